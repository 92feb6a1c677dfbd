"""The measurement of overlap.py, to be run by both workers."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterable, Sequence

import tensorflow as tf
from measuring import Figure, choose_size, ratio
from scaling_parts import dense, of_chief, one_thread
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from trainings import Train, tfdist_training

from tfdist.strategies.multi_worker import DEFAULT_PACKING, MultiWorker

STEPS, ROUNDS = 4, choose_size(5, 1)
Span = tuple[int, int]  # picoseconds


def multi_worker() -> list[Figure]:
    one_thread()
    strategy = MultiWorker()
    strategy.connect()
    figures = []
    for packing, how in ((DEFAULT_PACKING, f"packs of {DEFAULT_PACKING >> 20} MiB"), (0, "one message")):
        strategy.bytes_per_pack = packing
        train = tfdist_training(strategy, dense(512))
        train(STEPS)
        measured = _overlap if strategy.topology.is_chief else _untraced
        both, reducing = zip(*[measured(train) for _ in range(ROUNDS)], strict=True)
        name = f"{dense(512).name}, {how}: time of a step that reduces and computes ÷ that reduces"
        figures.append(ratio(name, both, reducing, None, unit="s"))
    return of_chief(strategy, figures)


def _overlap(train: Train) -> tuple[float, float]:
    """Seconds a step in which a reduction runs beside a kernel of the pass, and in which one runs at all."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        tf.profiler.experimental.start(scratch)
        train(STEPS)
        tf.profiler.experimental.stop()
        (path,) = pathlib.Path(scratch).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    reduces: list[Span] = []
    computes: list[Span] = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                begin = line.timestamp_ns * 1000 + event.offset_ps
                if name.endswith(":CollectiveReduceV2") and "while" in name:
                    reduces.append((begin, begin + event.duration_ps))
                elif ":" in name and ("gradient_tape" in name or "/mlp" in name):
                    computes.append((begin, begin + event.duration_ps))
    reduces, computes = merged(reduces), merged(computes)
    return overlap(reduces, computes) / 1e12 / STEPS, sum(end - begin for begin, end in reduces) / 1e12 / STEPS


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time in order, each moment once."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def overlap(some: Sequence[Span], others: Sequence[Span]) -> int:
    """The time that lies in both; each is in order, with no moment twice."""
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def _untraced(train: Train) -> tuple[float, float]:
    train(STEPS)
    return 0.0, 1.0
