"""Puts a profile in words: where the time of its steps went, the most expensive operations, and what to change.

Invariant: a function of the profile alone. The four shares add up to the time of the calls: computing; of the rest,
what goes into waiting for input and into communication; and what is between operations. `profiler.py` calls it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable

from tfdist.training.watch.profile_operations import (
    COMMUNICATION,
    CONVOLUTION,
    PRODUCT,
    Operation,
    Profile,
    Span,
    merged,
    overlap,
    read,
)

NUM_SHOWN = 10
LARGE_WAIT = 0.1  # of the time, for input
LARGE_SHARE = 0.25  # of the time, for what else keeps a device from computing
ARITHMETIC = 0.6  # of the operations' time, in products and convolutions
_SECOND = 1e12  # picoseconds
_SCOPES = re.compile(r"\b(while/body/_\d+/|gradient_tape/|while/|cond/(branch_executed/)?|StatefulPartitionedCall/)")


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of the time of the calls, as a mean over devices; they add up to 1."""

    computing: float
    input: float
    communication: float
    between: float

    @property
    def idle(self) -> float:
        return 1 - self.computing


def summarize(data: bytes, *, title: str) -> str:
    """The text for the content of an .xplane.pb."""
    profile = read(data)
    operations = [operation for device in profile.devices for operation in device]
    seconds, devices = _length(profile.calls) / _SECOND, len(profile.devices)
    if not operations or not profile.steps:
        return f"{title}: it holds no operations.\n"
    shares = shares_of(profile)
    where = f"{devices} × {profile.device_type}" if devices > 1 else profile.device_type
    lines = [
        f"{title} ({where}, host {profile.host}): {1e3 * seconds:.1f} ms in {_calls(profile)}, "
        f"{_milliseconds(seconds / profile.steps)} a step",
        f"  computing {shares.computing:.0%}, idle {shares.idle:.0%}: waiting for input {shares.input:.0%}, "
        f"communication {shares.communication:.0%}, between operations {shares.between:.0%}",
        "by kind of operation:",
        *_table(_summed((each.kind, each) for each in operations), profile.steps, num_shown=NUM_SHOWN),
        f"the {NUM_SHOWN} most expensive operations:",
        *_table(_summed((_named(each), each) for each in operations), profile.steps, num_shown=NUM_SHOWN),
        "what to change:",
        *(f"  - {hint}" for hint in hints(profile, shares)),
    ]
    return "\n".join(lines) + "\n"


def shares_of(profile: Profile) -> Shares:
    """Where the time of the calls went."""
    total = _length(profile.calls)
    found = []
    for device in profile.devices:
        computing = [each.span for each in device if each.kind != COMMUNICATION]
        communicating = [each.span for each in device if each.kind == COMMUNICATION]
        layers = [computing, [*computing, *profile.fetching], [*computing, *profile.fetching, *communicating]]
        until = [overlap(merged(spans), profile.calls) / total for spans in layers]
        found.append((until[0], until[1] - until[0], until[2] - until[1], 1 - until[2]))
    return Shares(*(sum(each) / len(found) for each in zip(*found, strict=True)))


def hints(profile: Profile, shares: Shares) -> list[str]:
    """What would help, by what stands out."""
    operations = [operation for device in profile.devices for operation in device]
    own = sum(each.own for each in operations)
    arithmetic = sum(each.own for each in operations if each.kind in (CONVOLUTION, PRODUCT)) / own
    found = []
    if shares.input >= LARGE_WAIT:
        found.append("Steps wait for their input: decode it once, into .npy files; see docs/data.md.")
    if shares.communication >= LARGE_SHARE:
        found.append(
            "Steps wait for sums over replicas, or for a slower worker: a larger train.global_batch_size makes them "
            "rarer, train.reduce_precision = 'bfloat16' smaller."
        )
    if shares.between >= LARGE_SHARE:
        is_short = profile.steps == len(profile.calls)
        calls = " Calls have one step each: a larger train.steps_per_call saves the way through Python." * is_short
        found.append(
            "Much time goes into starting operations and into those too small to be recorded: a larger "
            f"train.global_batch_size, or train.xla = 'on', which makes fewer operations.{calls}"
        )
    if arithmetic >= ARITHMETIC and shares.computing >= ARITHMETIC:
        found.append(_of_arithmetic(profile.device_type, arithmetic))
    return found or ["Nothing stands out."]


def _of_arithmetic(device_type: str, share: float) -> str:
    bound = f"{share:.0%} of the operations' time is matrix products and convolutions, so the arithmetic is the limit: "
    if device_type == "CPU":
        return f"{bound}more cores, more workers, or a GPU."
    return f"{bound}train.precision = 'bfloat16' or 'float16', if neither is set, or more devices."


def _summed(named: Iterable[tuple[str, Operation]]) -> list[tuple[str, int, int]]:
    """Each name with its operations' own time and their number, the most expensive first."""
    times: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for name, operation in named:
        times[name] += operation.own
        counts[name] += 1
    return [(name, time, counts[name]) for name, time in times.most_common()]


def _table(rows: list[tuple[str, int, int]], steps: int, *, num_shown: int) -> list[str]:
    total = sum(time for _, time, _ in rows)
    return [
        f"  {time / total:6.1%}  {_milliseconds(time / _SECOND / steps):>9} a step  {count / steps:7.4g} ×  {name}"
        for name, time, count in rows[:num_shown]
    ]


def _named(operation: Operation) -> str:
    """Its type, and the layer where the name of its node tells: "convnet/dense_1"."""
    backward = ", backward" if "gradient_tape/" in operation.node else ""
    scope = _SCOPES.sub("", operation.node).rpartition("/")[0]
    return operation.type if not scope else f"{operation.type}  ({scope}{backward})"


def _calls(profile: Profile) -> str:
    return "1 call" if len(profile.calls) == 1 else f"{len(profile.calls):,} calls"


def _length(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
