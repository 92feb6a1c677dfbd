"""Reads what TensorFlow's profiler wrote: which operation ran when, on which device.

Invariant: a function of the file alone. Times are picoseconds since the profile began; where a thread runs one
operation within another, the time counts for the inner one. `profile_summary.py` puts it in words.

The planes of a GPU or a TPU count where there are any, else the threads of the CPU. TensorFlow names an operation
NODE:TYPE there, XLA by its instruction. What devices other than CPUs write was not seen; the names of their lines and
statistics are those of TensorFlow's sources (tsl/profiler/utils/xplane_schema.cc).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

MARK = "train"  # what the profiler's time line calls a call of the step function
_FETCH = "IteratorGetNextOp::DoCompute"  # a step waits for a batch
_NODE = re.compile(r"([^:]+):(\w+)")
_DEVICE = re.compile(r"/device:(GPU|TPU):\d+")
_DEVICE_LINES = re.compile(r"XLA Ops|Stream ")
_INPUT_LINES = "tf_data"

COMMUNICATION, CONVOLUTION, PRODUCT, OTHER = "communication", "convolution", "matrix product", "elementwise and other"
KINDS = {
    COMMUNICATION: r"collective|nccl|horovod|all-?(reduce|gather|to-all)|reduce-scatter|^_(host)?(send|recv)$",
    CONVOLUTION: r"conv(?!ert)|cudnn.*(wgrad|dgrad)",
    PRODUCT: r"matmul|einsum|gemm|^dot|lstm|gru",
    "pooling": r"pool|reduce-window|select-and-scatter",
    "normalization": r"batchnorm|batch-norm|layernorm",
    "variables": r"assign|apply|variable",
    "data movement": r"transpose|concat|slice|split|pack|gather|scatter|reshape|pad|tile|copy|mem(cpy|set)|cast|conver",
    "fused by XLA": r"fusion",
}

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One execution: of which node, of which type, when, and for how long without the operations within it."""

    node: str
    type: str
    span: Span
    own: int

    @property
    def kind(self) -> str:
        """A key of KINDS, or OTHER."""
        return next((kind for kind, names in KINDS.items() if re.search(names, self.type, re.IGNORECASE)), OTHER)


@dataclasses.dataclass(frozen=True)
class Profile:
    """What one process did in the calls that are marked.

    Attributes:
      host: its machine.
      device_type: "CPU", "GPU" or "TPU".
      devices: the operations of each; of the CPU's threads together.
      calls: when they were.
      steps: how many they did.
      fetching: when a batch was asked for and not there yet.
    """

    host: str
    device_type: str
    devices: Sequence[Sequence[Operation]]
    calls: Sequence[Span]
    steps: int
    fetching: Sequence[Span]


def read(data: bytes) -> Profile:
    """The profile in a serialized XSpace, the content of an .xplane.pb."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    space = XSpace.FromString(data)
    (host,) = [plane for plane in space.planes if plane.name == "/host:CPU"]
    planes = [plane for plane in space.planes if _DEVICE.match(plane.name)]
    found = _DEVICE.match(planes[0].name) if planes else None
    events = [
        (host.event_metadata[event.metadata_id].name, line, event) for line in host.lines for event in line.events
    ]
    marks = [(_span(line, event), _stats(host, event)) for name, line, event in events if name == MARK]
    marks = [(span, stats) for span, stats in marks if "steps" in stats]
    calls = merged(span for span, _ in marks)
    devices = [_of_device(plane) for plane in planes] or [_of_threads(host)]
    return Profile(
        host=", ".join(space.hostnames),
        device_type=found[1] if found else "CPU",
        devices=[[each for each in operations if overlap([each.span], calls)] for operations in devices],
        calls=calls,
        steps=sum(stats["steps"] for _, stats in marks),
        fetching=merged(_span(line, event) for name, line, event in events if name == _FETCH),
    )


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
    total = i = j = 0
    while i < len(some) and j < len(others):
        total += max(0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


def _of_threads(host: Any) -> list[Operation]:
    """What the threads of the CPU computed, but for those of the input pipeline."""
    named: dict[int, tuple[str, str] | None] = {}  # by the number of an event's name, which tells all that is needed
    operations: list[Operation] = []
    for line in host.lines:
        if line.name.startswith(_INPUT_LINES):
            continue
        found = []
        for event in line.events:
            if event.metadata_id not in named:
                name = host.event_metadata[event.metadata_id].name
                node = _NODE.fullmatch(name)
                instruction = None if node else _stats(host, event).get("hlo_op")
                named[event.metadata_id] = (node[1], node[2]) if node else instruction and _instruction(instruction)
            if (names := named[event.metadata_id]) is not None:
                found.append((_span(line, event), *names))
        operations += _with_own_time(found)
    return operations


def _of_device(plane: Any) -> list[Operation]:
    """What a GPU's streams or a TPU's cores computed, by the operation that a kernel is part of, if that is known."""
    operations: list[Operation] = []
    for line in plane.lines:
        if _DEVICE_LINES.match(line.name):
            found = []
            for event in line.events:
                stats, kernel = _stats(plane, event), plane.event_metadata[event.metadata_id].name
                node = _NODE.fullmatch(str(stats.get("tf_op", "")))
                names = (node[1], node[2]) if node else _instruction(str(stats.get("hlo_op", kernel)))
                found.append((_span(line, event), *names))
            operations += _with_own_time(found)
    return operations


def _instruction(name: str) -> tuple[str, str]:
    """XLA numbers instructions of one name: "dot.12" is a "dot"."""
    return name, re.sub(r"\.\d+$", "", name)


def _with_own_time(found: list[tuple[Span, str, str]]) -> list[Operation]:
    """The operations of one thread, some of which may lie within others."""
    within: list[tuple[Span, int]] = []  # those that have begun and not ended, with the place of each in `own`
    own: list[int] = []
    found.sort(key=lambda each: (each[0][0], -each[0][1]))
    for place, ((begin, end), _, _) in enumerate(found):
        while within and within[-1][0][1] <= begin:
            within.pop()
        if within:
            own[within[-1][1]] -= min(end, within[-1][0][1]) - begin
        own.append(end - begin)
        within.append(((begin, end), place))
    return [Operation(node, type_, span, time) for (span, node, type_), time in zip(found, own, strict=True)]


def _span(line: Any, event: Any) -> Span:
    begin = 1000 * line.timestamp_ns + event.offset_ps
    return begin, begin + event.duration_ps


def _stats(plane: Any, event: Any) -> dict[str, Any]:
    """An event's statistics by name; those that are a reference name what they are."""
    stats = {}
    for stat in event.stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind)
        stats[plane.stat_metadata[stat.metadata_id].name] = (
            plane.stat_metadata[value].name if kind == "ref_value" else value
        )
    return stats
