"""What the chief of a sweep needs of where trials run: a number of slots, each of which runs one trial at a time.

`local_slots.py` has the slots of this machine, `ray_tasks.py` those of a Ray cluster; the chief knows no difference,
but for the host that the journal names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from tfdist.strategies.cluster import environment
from tfdist.telemetry.run_directory import RunDirectory

LOG = "output.log"
EXIT_KILLED = 137  # 128 + SIGKILL
OUT_OF_MEMORY = "the kernel killed a process here for want of memory: out of memory"
# cgroups(7), version 2: this container's own count. Else proc(5): the machine's, since Linux 4.13.
_COUNTERS = (pathlib.Path("/sys/fs/cgroup/memory.events"), pathlib.Path("/proc/vmstat"))
_CAUSE = re.compile(r"^\[launch\] worker (\d+) ended with", re.MULTILINE)
_SHOWN_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True)
class TrialCommand:
    """The command that trains a trial.

    Attributes:
      arguments: of tfdist.main, but for what differs between trials.
      launch: flags of tfdist.launch, for trials of several workers.
    """

    arguments: Sequence[str]
    launch: Sequence[str] = ()

    def build(self, directory: RunDirectory, parameters: Sequence[str]) -> list[str]:
        """Returns what follows `python -m` for the run of this directory with these gin statements."""
        own = [*self.arguments, *(f"--gin_param={each}" for each in parameters), f"--run_dir={directory.path}"]
        return ["tfdist.launch", *self.launch, "--", *own] if self.launch else ["tfdist.main", *own]

    def find_cause(self, log: str) -> str:
        """The end of a log as it tells why the trial ended: of several workers, the lines of the one to blame."""
        if not self.launch:
            return log
        cause = _CAUSE.findall(log)
        prefix = f"[worker {cause[-1]}] " if cause else "[launch] "
        return "\n".join(line.removeprefix(prefix) for line in log.splitlines() if line.startswith(prefix))


@dataclasses.dataclass(frozen=True)
class TrialExit:
    """A trial whose command ended.

    Attributes:
      name: of the trial.
      status: as a shell gives it, 128 + N for signal N.
      log: the end of what it wrote, and what is known of its end.
      lost: where nothing is known of its end: why.
    """

    name: str
    status: int
    log: str
    seconds: float
    lost: str = ""


class Slots(Protocol):
    """A number of slots, each of which runs one trial at a time."""

    @property
    def num_free(self) -> int:
        """The number of trials that could be started now."""

    @property
    def next_host(self) -> str | None:
        """The node where the next trial will run, of a free slot; None is this machine."""

    def start(self, directory: RunDirectory, parameters: Sequence[str]) -> None:
        """Starts a training of this directory, with these gin statements, in the next free slot."""

    def stop(self, name: str) -> None:
        """Lets a trial save and leave; does nothing where it has ended."""

    def wait(self, seconds: float) -> None:
        """Waits so long at most for a trial to end."""

    def collect(self) -> Iterator[TrialExit]:
        """The trials that ended since; does not wait. Raises TfdistError where no trial can be started any more."""

    def close(self) -> None:
        """Kills what still runs."""


def trial_environment() -> dict[str, str]:
    """The variables of this process as trials need them: a trial is none of the tasks that Slurm started."""
    return {name: value for name, value in environment.current().items() if name != environment.SLURM_TASKS}


def count_memory_kills() -> int:
    """How often this container, or the machine, killed a process for want of memory since it was started."""
    for path in _COUNTERS:
        with contextlib.suppress(OSError):
            counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def explain_kill(status: int, log: str, kills_before: int) -> str:
    """The log of a process, which ends with the reason where the kernel killed it for want of memory."""
    was_for_memory = status == EXIT_KILLED and count_memory_kills() > kills_before
    return f"{log.rstrip()}\n{OUT_OF_MEMORY}" if was_for_memory else log


def read_log(path: str) -> str:
    """Reads the end of a process's output."""
    try:
        with open(path, "rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _SHOWN_BYTES))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
