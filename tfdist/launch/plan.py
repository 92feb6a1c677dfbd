"""What is to be started: the workers, their command and their environment.

Invariant: a `Plan` holds all that a launcher needs; nothing below `__main__.py` reads this process's environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist.launch.processes import cpu_shares
from tfdist.strategies.cluster.environment import ALL_WORKERS_VARIABLE, without_proxy

PLACE_VARIABLE = "TFDIST_PLACE"  # which of the machine's workers a process is, also where some are left out
_THIS_MACHINE = ("127.0.0.1", "localhost")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A start of processes of `command`.

    Attributes:
      num_workers: when all are there.
      command: of each.
      environment: of each.
      pin_cpus: gives each its share of the CPUs.
      left_out: the places, counted from 0, of workers that are not started. The others are numbered without a gap.
      first_index: of the workers that are started; others may be somewhere else.
      hosts: of each worker, as `--hosts_command` lists it; empty: this machine.
    """

    num_workers: int
    command: tuple[str, ...]
    environment: dict[str, str]
    pin_cpus: bool = False
    left_out: frozenset[int] = frozenset()
    first_index: int = 0
    hosts: tuple[str, ...] = ()

    @property
    def places(self) -> list[int]:
        """The place of each worker that is started."""
        return [place for place in range(self.num_workers) if place not in self.left_out]

    @property
    def cpus(self) -> list[list[int]]:
        """The CPUs of each worker that is started; an empty list is all."""
        shares = cpu_shares(self.num_workers) if self.pin_cpus else [[]] * self.num_workers
        return [shares[place] for place in self.places]

    def place_of(self, index: int) -> int:
        """Where worker `index` is started."""
        return self.places[index - self.first_index]

    @property
    def launcher_variables(self) -> dict[str, str]:
        """Of the environment what is the launcher's own doing; on another machine all else is that machine's."""
        return {name: value for name, value in self.environment.items() if name.startswith("TFDIST_")}

    def own_variables(self, index: int) -> dict[str, str]:
        """What worker `index` alone has in its environment."""
        variables = {PLACE_VARIABLE: str(self.place_of(index))}
        return variables | ({ALL_WORKERS_VARIABLE: str(self.num_workers)} if self.left_out else {})


def host_of(slot: str) -> str:
    """The host of one of `Plan.hosts`, of which a host's second is `HOST#2`."""
    return slot.partition("#")[0]


def worker_environment(
    environment: Mapping[str, str], *, keep_cluster: bool = False, columns: int | None = None
) -> dict[str, str]:
    """The launcher's environment as workers on this machine need it.

    Lines appear when they are printed, and a proxy does not stand between the workers, as gRPC else arranges it.
    TF_CONFIG is the launcher's to make, unless it is to be kept. On a terminal of so many `columns` a worker's lines
    leave room for its name.
    """
    changed = {**environment, "PYTHONUNBUFFERED": "1"}
    if not keep_cluster:
        changed.pop("TF_CONFIG", None)
    changed.pop(ALL_WORKERS_VARIABLE, None)
    if columns is not None:
        changed["COLUMNS"] = str(max(0, columns - len("[worker 0] ")))
    return changed | without_proxy(_THIS_MACHINE, environment)
