"""How long an all-reduce takes between the workers, from 1 KiB up, through the strategy that a run would use.

Bandwidth is the tensor's bytes by the time; bus bandwidth is that times 2 (n - 1) / n, what each worker sends in a
ring, which can be laid beside the speed of the network (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

Invariant: every worker makes the same number of reductions of the same sizes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.doctor.findings import WARNING, Finding, ok_finding
from tfdist.strategies.strategy import Strategy, Topology
from tfdist.telemetry.console.console_text import align_columns, in_bytes

GROUP = "allreduce"
KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
SIZES = tuple(KIBIBYTE << shift for shift in (0, 2, 4, 6, 8, 10, 12, 14, 16))  # 1 KiB to 64 MiB
SLOW_BYTES_PER_SECOND = 1e8  # a network of 1 Gbit/s; below it gradients take longer than most models compute


@dataclasses.dataclass(frozen=True)
class Timing:
    """An all-reduce of `num_bytes` on each replica; the median and the quickest of `times`."""

    num_bytes: int
    times: int
    seconds: float
    least_seconds: float
    num_replicas: int

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth."""
        return self.num_bytes / self.seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """The bandwidth of the network where the all-reduce is a ring."""
        return self.bytes_per_second * 2 * (self.num_replicas - 1) / self.num_replicas


def measure(strategy: Strategy, sizes: Sequence[int] = SIZES) -> list[Timing]:
    """Times all-reduces of a strategy that is connected; a collective itself."""
    num_replicas = strategy.topology.num_replicas
    return [_time(_build_reduction(strategy, num_bytes), num_bytes, num_replicas) for num_bytes in sizes]


def _build_reduction(strategy: Strategy, num_bytes: int) -> Callable[[], tf.Tensor]:
    value = tf.ones([num_bytes // 4])

    @tf.function
    def reduce() -> tf.Tensor:
        summed = strategy.run(lambda: strategy.sum_over_replicas([tf.identity(value)])[0])
        return tf.reduce_sum(strategy.first_local(summed)[:1])

    return reduce


def _time(reduce: Callable[[], tf.Tensor], num_bytes: int, num_replicas: int) -> Timing:
    for _ in range(2):  # the first traces and connects
        got = float(reduce())
    assert got == num_replicas, (got, num_replicas)
    times = 20 if num_bytes <= MEBIBYTE else 5
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        reduce().numpy()
        seconds.append(time.perf_counter() - began)
    return Timing(num_bytes, times, statistics.median(seconds), min(seconds), num_replicas)


def make_finding(timings: Sequence[Timing], strategy_name: str, topology: Topology) -> Finding:
    """The timings as a finding, with the table on the chief: the others' is the same."""
    what = f"{strategy_name}, {topology.num_workers} workers, {topology.num_replicas} replicas"
    what += f"\n{format_table(timings)}" if topology.is_chief else "; worker 0 shows the times"
    details = {
        "strategy": strategy_name,
        "timings": [
            dataclasses.asdict(each)
            | {"bytes_per_second": each.bytes_per_second, "bus_bytes_per_second": each.bus_bytes_per_second}
            for each in timings
        ],
    }
    best = max(each.bus_bytes_per_second for each in timings)
    if timings[-1].num_bytes < MEBIBYTE or best >= SLOW_BYTES_PER_SECOND:
        return ok_finding(GROUP, what, **details)
    return Finding(
        WARNING,
        GROUP,
        what,
        f"At {best / 1e6:.0f} MB/s the gradients of a model of 25 million parameters take {1e8 / best:.1f} s a step.",
        "Use a faster network or machines that are nearer to each other; look at what `network` says.",
        details,
    )


def format_table(timings: Sequence[Timing]) -> str:
    """The timings, a line each."""
    rows: list[tuple[str, ...]] = [("size", "median", "quickest", "bandwidth", "bus")]
    for each in timings:
        times = (f"{seconds * 1e3:,.2f} ms" for seconds in (each.seconds, each.least_seconds))
        rates = (f"{rate / 1e6:,.1f} MB/s" for rate in (each.bytes_per_second, each.bus_bytes_per_second))
        rows.append((in_bytes(each.num_bytes), *times, *rates))
    return align_columns(rows, rows[0])
