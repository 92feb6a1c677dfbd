"""tfdist beside other frameworks: PyTorch, Keras on JAX, JAX and grain, which tools/peers.sh installs.

Each framework runs in processes of its own; all take samples in turn, in each round one. A figure is the median of the
rounds' ratios, tfdist ÷ peer. Where the sides' models differ in their number of weights, or their batches in types or
shapes, there is no figure. Takes some thirty minutes on two cores.

    one_device    steps/s of seven models on all cores, beside Keras's fit on JAX, a hand-written loop on JAX, PyTorch
                  eager and compiled (for images with channels last too): the same layers, Adam, batch and number of
                  examples, shuffled in memory
    two_workers   steps/s of two processes with a core and a thread each, under MultiWorker and, where it is installed,
                  Horovod, beside PyTorch's DistributedDataParallel over gloo
    input         examples/s of PNG files in ArrayRecord, of a Parquet table and of arrays in memory, beside the best of
                  grain with and without threads and worker processes, which the figure names

    python benchmarks/peers.py [--part=PART] [--rounds=N] [--json=FILE]
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import scaling
import tensorflow as tf
from input import NUM_IMAGES, SMALL_IMAGE, WARM_BATCHES, Drawn, build_own, decode_photos, make_photos
from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples
from peer import Peer, Seconds, describe_arrays, require_peer, time_steps
from scaling import LAUNCH, connect, count_steps, keep_chiefs
from sizes import ONE_DEVICE, TWO_WORKERS, Size
from trainings import build_training
from workloads import build_workload

from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.indexed import IndexedSource
from tfdist.data.sources.source import Source
from tfdist.data.tables.tables import Table
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy

PARTS = ("one_device", "two_workers", "input")
SAMPLE_SECONDS = choose_size(0.5, 0.01)
ON_JAX = {"Keras on JAX, fit": "fit", "JAX by hand": "step"}
NUM_PHOTOS = choose_size(1024, 64)
GROUP_ROWS, NAMES = 1024, [f"c{i}" for i in range(8)]
NUM_ROWS = choose_size(64, 1) * GROUP_ROWS
NUM_TABLES = 4
GRAIN_THREADS = (0, 4)
BATCHES = {"png": 64, "parquet": 256, "memory": 256}


def measure(parts: Sequence[str], *, rounds: int) -> Iterator[list[Figure]]:
    if "one_device" in parts:
        for name in ONE_DEVICE:
            yield measure_part("peers", "one_device", name, rounds)
    if "two_workers" in parts:
        require_peer("peers_torch.py")  # one of two workers that exits fails the other
        for strategy in ("multi_worker", *(["horovod"] if importlib.util.find_spec("horovod") else [])):
            yield measure_part("peers", "two_workers", strategy, rounds, launch=LAUNCH[strategy])
    if "input" in parts:
        for kind in WRITERS:
            yield measure_part("peers", "reading", kind, rounds)


def one_device(name: str, rounds: str) -> list[Figure]:
    strategy, size = OneDevice(), ONE_DEVICE[name]
    strategy.connect()
    learner, train = build_training(strategy, build_workload(name, size), tell=print)
    peers = {peer: Peer("peers_jax.py", name, way) for peer, way in ON_JAX.items()}
    peers |= {f"PyTorch, {way}": Peer("peers_torch.py", name, way) for way in list_pytorch_ways(size)}
    check_equal(name, "weights", str(learner.model.count_params()), peers)
    mine, *theirs = take_samples([build_sample(time_steps(train)), *map(build_sample, peers.values())], int(rounds))
    return compare_with_peers(name, mine, dict(zip(peers, theirs, strict=True)))


def two_workers(strategy_name: str, rounds: str) -> list[Figure]:
    _, strategy = connect(strategy_name)
    figures = []
    for name, size in TWO_WORKERS.items():
        tell = print if strategy.topology.is_chief else lambda message: None
        learner, train = build_training(strategy, build_workload(name, size), tell=tell)
        steps = count_steps(strategy, train)
        ways = list_pytorch_ways(size)
        with start_ddp(strategy, name, ways, learner.model.count_params()) as sample:
            theirs = [functools.partial(sample, way) for way in ways]
            mine, *others = take_samples([scaling.build_sample(strategy, train, steps), *theirs], int(rounds))
        if strategy.topology.is_chief:
            named = {f"PyTorch DDP, {way}": each for way, each in zip(ways, others, strict=True)}
            figures += compare_with_peers(f"{name}, {strategy.name}", mine, named)
    return keep_chiefs(strategy, figures)


@contextlib.contextmanager
def start_ddp(strategy: Strategy, name: str, ways: Sequence[str], weights: int) -> Iterator[Callable[[str], float]]:
    """Starts PyTorch's processes of a model; a function takes a sample of one way, while this run waits. A collective.

    Args:
      strategy: of two workers.
      name: of the model.
      ways: of peers_torch.py.
      weights: the number that the model has here.
    """
    other = int(strategy.sum_over_workers([0 if strategy.topology.is_chief else os.getpid()])[0])
    peers, rates = {}, {}
    if strategy.topology.is_chief:
        peers = {f"PyTorch DDP, {way}": Peer("peers_torch.py", name, way, workers=2) for way in ways}
        check_equal(name, "weights", str(weights), peers)
        rates = {way: build_sample(process) for way, process in zip(ways, peers.values(), strict=True)}

    def sample(way: str) -> float:
        rate = 0.0
        if rates:
            with pause(other):
                rate = rates[way]()
        strategy.any_worker(False)  # where the other worker waits
        return rate

    yield sample
    for process in peers.values():
        process.close()


@contextlib.contextmanager
def pause(process: int) -> Iterator[None]:
    """Stops the worker that waits: Horovod's thread would take a part of its core, and the chief's waits for it.

    The launcher may report that it hangs, and leaves it at that.
    """
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def reading(kind: str, rounds: str) -> list[Figure]:
    """tfdist's pipeline beside the best of grain's settings, which a few samples of each find first."""
    batch = BATCHES[kind]
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        source = WRITERS[kind](Path(scratch))
        first = tf.nest.flatten(next(iter(build_own(source, batch)))["examples"])
        mine = Drawn(build_own(source, batch), batch)
        peers, found = {}, {}
        for threads, workers in itertools.product(GRAIN_THREADS, (0, len(os.sched_getaffinity(0)))):
            peer = f"grain, {threads} threads, {workers} workers"
            peers[peer] = Peer("peers_grain.py", kind, scratch, batch, threads, workers)
            rate = build_sample(peers[peer], per_step=batch, warm=WARM_BATCHES)
            found[peer] = statistics.median(rate() for _ in range(3)), rate
        check_equal(kind, "batches", describe_arrays(each.numpy() for each in first), peers)
        best = max(found, key=lambda peer: found[peer][0])
        samples = take_samples([mine.sample, found[best][1]], int(rounds))
        mine.end()
        for process in peers.values():
            process.close()
    return [make_ratio(f"{kind}: tfdist ÷ {best}", *samples, 1.2, unit="examples/s")]


def write_photos(directory: Path) -> Source:
    """ArrayRecord, each record a byte that is the class and a PNG file."""
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from array_record.python.array_record_module import ArrayRecordWriter

    path = str(directory / "records")
    writer = ArrayRecordWriter(path, "group_size:1")
    for index, photo in enumerate(make_photos(NUM_PHOTOS)):
        writer.write(bytes([index % 10]) + photo)
    writer.close()

    def decode(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        classes = tf.io.decode_raw(tf.strings.substr(records, 0, 1), tf.uint8)[:, 0]
        return decode_photos(tf.strings.substr(records, 1, -1)), tf.cast(classes, tf.int32)

    return IndexedSource(ArrayRecordDataSource(path), transform=decode)


def write_table(directory: Path) -> Source:
    """Parquet files of float32 columns."""
    import pyarrow
    from pyarrow import parquet

    numbers = np.random.default_rng(0).standard_normal((NUM_TABLES, len(NAMES), NUM_ROWS), dtype=np.float32)
    for index, columns in enumerate(numbers):
        rows = pyarrow.table(dict(zip(NAMES, columns, strict=True)))
        parquet.write_table(rows, directory / f"part-{index}.parquet", row_group_size=GROUP_ROWS)
    return Table(files=str(directory / "*.parquet"), columns=Columns(inputs=NAMES[1:], targets=NAMES[0]))


def write_arrays(directory: Path) -> Source:
    """Images and classes in memory, left as files for the other side to load."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((NUM_IMAGES, *SMALL_IMAGE), dtype=np.float32)
    y = generator.integers(0, 10, NUM_IMAGES, dtype=np.int32)
    np.save(directory / "x.npy", x), np.save(directory / "y.npy", y)
    return ArraySource((x, y))


WRITERS = {"png": write_photos, "parquet": write_table, "memory": write_arrays}


def compare_with_peers(name: str, mine: Sequence[float], theirs: Mapping[str, Sequence[float]]) -> list[Figure]:
    return [make_ratio(f"{name}: tfdist ÷ {peer}", mine, each, 1.0) for peer, each in theirs.items()]


def list_pytorch_ways(size: Size) -> tuple[str, ...]:
    """Those of peers_torch.py that the model has."""
    return ("eager", "compiled", "channels_last") if size.kind == "convnet" else ("eager", "compiled")


def check_equal(name: str, what: str, mine: str, peers: Mapping[str, Peer]) -> None:
    """Prints what each side has.

    Raises:
      SystemExit: it is not the same.
    """
    told = {"tfdist": mine} | {peer: process.told for peer, process in peers.items()}
    print(f"{name}, {what}: {'; '.join(f'{side}: {each}' for side, each in told.items())}", flush=True)
    if len(set(told.values())) > 1:
        sys.exit(f"The sides of {name} are not comparable: their {what} differ.")


def build_sample(seconds: Seconds, per_step: int = 1, warm: int = 0) -> Callable[[], float]:
    """A function that takes one sample of about SAMPLE_SECONDS, in steps/s, or in what a step has `per_step` of.

    Of `warm` steps before it, which empty a pipeline's buffers, the sample has at least as many again.
    """

    def warmed(steps: int) -> float:
        if warm:
            seconds(warm)
        return seconds(steps)

    steps = max(1, warm)
    seconds(steps)  # what is compiled first is not counted
    while (taken := warmed(steps)) < SAMPLE_SECONDS / 2:
        steps *= 2
    steps = max(1, warm, round(steps * SAMPLE_SECONDS / taken))
    return lambda: steps * per_step / warmed(steps)


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"rounds": 9})
