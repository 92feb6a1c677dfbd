"""Goodput: which part of a run's wall clock, over all of its starts, went into steps that counted.

Invariant: a worker's intervals follow one another without a gap, and its account adds up to its wall clock, from the
beginning of its first process to its last sample. Steps that a later start did again count for nothing, and so does the
time in which no process of the worker ran; a killed process's time after its last sample is part of that. Pure
functions; the report and the training use them.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence

from tfdist.telemetry.account.time_account import SHARES
from tfdist.telemetry.facts import Sample
from tfdist.telemetry.result import Start

COMPUTE = "compute"
REDONE, DOWN = "lost: steps done again", "lost: between starts"
# In the order in which a report stacks them; behind a process's own, what only the whole run can tell.
ALL_SHARES = {**SHARES, REDONE: "computed, and again by a later start", DOWN: "no process of this worker ran"}


@dataclasses.dataclass(frozen=True)
class Account:
    """Seconds by the names of ALL_SHARES, those that are zero left out."""

    seconds: Mapping[str, float]

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Between 0 and 1; None where there was no time."""
        return self.seconds.get(COMPUTE, 0.0) / self.wall_seconds if self.wall_seconds > 0 else None


def compute_accounts(samples: Iterable[Sample], starts: Sequence[Start]) -> dict[int, Account]:
    """Returns each worker's wall-clock time by category (compute, input, down, …).

    Args:
      samples: of all workers and starts, each worker's in its order.
      starts: of the run.
    """
    by_worker = {}
    for worker, processes in split_by_process(samples).items():
        parts: list[Account] = []
        for before, process in itertools.pairwise([[], *processes]):
            pause = (_began(process[0]) - before[-1].time).total_seconds() if before else 0.0
            parts += [Account({DOWN: max(pause, 0.0)}), _count_process(process, starts)]
        by_worker[worker] = sum_accounts(parts)
    return by_worker


def sum_accounts(parts: Iterable[Account]) -> Account:
    """Sums accounts to one; of several workers in worker-seconds."""
    seconds: dict[str, float] = {}
    for part in parts:
        for share, value in part.seconds.items():
            seconds[share] = seconds.get(share, 0.0) + value
    return Account({share: seconds[share] for share in sorted(seconds, key=_sort_key) if seconds[share] > 0})


def goodput(samples: Iterable[Sample], starts: Sequence[Start]) -> float | None:
    """Computes the goodput of the whole run, all its workers together; None where nothing was sampled."""
    return sum_accounts(compute_accounts(samples, starts).values()).goodput


def split_by_process(samples: Iterable[Sample]) -> dict[int, list[list[Sample]]]:
    """Each worker's samples by process. A start that failed early may leave its number to the next."""
    by_worker: dict[int, list[list[Sample]]] = {}
    for sample in samples:
        processes = by_worker.setdefault(sample.worker, [])
        before = processes[-1][-1] if processes else None
        is_another = before is None or (sample.start, sample.process) != (before.start, before.process)
        processes.append([sample]) if is_another else processes[-1].append(sample)
    return {worker: by_worker[worker] for worker in sorted(by_worker)}


def _count_process(process: Sequence[Sample], starts: Sequence[Start]) -> Account:
    """The account of one process, without the steps that a later start did again."""
    start = process[0].start
    known = [sample.step for sample in process if sample.step is not None]
    step = starts[start].step if start < len(starts) else min(known, default=0)
    kept = min((each.step for each in starts[start + 1 :]), default=None)
    seconds, before = dict(process[-1].seconds), 0.0
    for sample in process:
        here = step if sample.step is None else sample.step
        computed = sample.seconds.get(COMPUTE, 0.0)
        lost = 0.0 if kept is None else (computed - before) * (1 - _count_steps(step, here, kept))
        seconds[COMPUTE], seconds[REDONE] = seconds.get(COMPUTE, 0.0) - lost, seconds.get(REDONE, 0.0) + lost
        step, before = here, computed
    return Account(seconds)


def _count_steps(first: int, last: int, kept: int) -> float:
    """The part of the steps from `first` to `last` that lies before `kept`, from where they were done again."""
    return min(max((kept - first) / (last - first), 0.0), 1.0) if last > first else float(kept > first)


def _began(sample: Sample) -> datetime.datetime:
    """When the process of a worker's sample began."""
    return sample.time - datetime.timedelta(seconds=sum(sample.seconds.values()))


def _sort_key(share: str) -> int:
    """Where a share stands among all; one that this release does not know stands last."""
    return list(ALL_SHARES).index(share) if share in ALL_SHARES else len(ALL_SHARES)
