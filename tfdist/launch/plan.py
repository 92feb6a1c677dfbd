"""What is to be started: the workers, their command and their environment.

Invariant: a `Plan` holds all that a launcher needs; nothing below `__main__.py` reads this process's environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist.launch.processes import cpu_shares
from tfdist.strategies.cluster.environment import ALL_WORKERS_VARIABLE, SLURM_TASKS, without_proxy

SLOT_VARIABLE = "TFDIST_SLOT"  # which of the machine's workers a process is, also where some are left out
_THIS_MACHINE = ("127.0.0.1", "localhost")


Slot = int | str  # a worker's number on this machine, counted from 0, or where a listing has room for it


@dataclasses.dataclass(frozen=True)
class Plan:
    """A start of processes of `command`.

    Attributes:
      num_workers: when all are there.
      command: of each.
      environment: of each.
      pin_cpus: gives each its share of the CPUs.
      slots: of each worker that is started; empty: all of this machine. Workers are numbered without a gap.
      first_index: of the workers that are started; others may be somewhere else.
    """

    num_workers: int
    command: tuple[str, ...]
    environment: dict[str, str]
    pin_cpus: bool = False
    slots: tuple[Slot, ...] = ()
    first_index: int = 0

    @property
    def slot_numbers(self) -> list[int]:
        """The slot of each worker that is started, from 0, which it keeps where others are left out."""
        slots = self.slots or range(self.num_workers)
        return [slot if isinstance(slot, int) else index for index, slot in enumerate(slots)]

    @property
    def cpus(self) -> list[list[int]]:
        """The CPUs of each worker that is started; an empty list is all."""
        shares = cpu_shares(self.num_workers) if self.pin_cpus else [[]] * self.num_workers
        return [shares[number] for number in self.slot_numbers]

    def own_variables(self, index: int) -> dict[str, str]:
        """Returns the environment variables that worker `index` alone has."""
        numbers = self.slot_numbers
        variables = {SLOT_VARIABLE: str(numbers[index - self.first_index])}
        return variables | ({ALL_WORKERS_VARIABLE: str(self.num_workers)} if len(numbers) < self.num_workers else {})


def host_of(slot: Slot) -> str:
    """The host of a slot that is listed, of which a host's second is `HOST#2`."""
    return str(slot).partition("#")[0]


def worker_environment(environment: Mapping[str, str], *, keep_cluster: bool = False) -> dict[str, str]:
    """The launcher's environment as workers on this machine need it.

    Lines appear when they are printed, and a proxy does not stand between the workers, as gRPC else arranges it.
    TF_CONFIG is the launcher's to make, unless it is to be kept. A worker is none of the tasks that Slurm started.
    """
    changed = {**environment, "PYTHONUNBUFFERED": "1"}
    if not keep_cluster:
        changed.pop("TF_CONFIG", None)
    for name in (ALL_WORKERS_VARIABLE, SLURM_TASKS):
        changed.pop(name, None)
    return changed | without_proxy(_THIS_MACHINE, environment)
