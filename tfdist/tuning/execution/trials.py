"""The command of a trial, how it ended, and what its log tells of that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence

from tfdist.errors import EXIT_BUG, EXIT_USER_ERROR, UserError
from tfdist.launch.processes import OUT_OF_MEMORY
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory

LOG = "output.log"
_PLACED = re.compile(r"^\[launch\] Ray placed worker \d+ on ([^\s,]+?)(?:,|\.$)", re.MULTILINE)
_CAUSE = re.compile(r"^\[launch\] worker (\d+) ended with", re.MULTILINE)
_LOST = re.compile(r"^\[launch\] (worker \d+ (?:was lost|could not be started): .*)", re.MULTILINE)
_SHOWN_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True)
class TrialCommand:
    """The command that trains a trial.

    Attributes:
      arguments: of tfdist.main, but for what differs between trials.
      launch: flags of tfdist.launch, for trials of several workers, or on a cluster.
    """

    arguments: Sequence[str]
    launch: Sequence[str] = ()

    def build(self, directory: RunDirectory, parameters: Sequence[str]) -> list[str]:
        """Returns what follows `python -m` for the run of this directory with these gin statements."""
        path = directory.path
        if self.launch and not files.is_remote(path):
            path = os.path.abspath(path)  # a worker may start elsewhere
        own = [*self.arguments, *(f"--gin_param={each}" for each in parameters), f"--run_dir={path}"]
        return ["tfdist.launch", *self.launch, "--", *own] if self.launch else ["tfdist.main", *own]

    def find_cause(self, status: int, log: str) -> tuple[str, str]:
        """Why a trial ended: the lines of its log that tell it, of several workers those of the one to blame.

        Where only the end of a worker, or of the launcher, is known and not its reason, the second text says so.

        Raises:
          UserError: the launcher cannot start the workers of any trial.
        """
        if not self.launch:
            return log, ""
        cause, lost = _CAUSE.findall(log), _LOST.findall(log)
        prefix = f"[worker {cause[-1]}] " if cause else "[launch] "
        lines = [line.removeprefix(prefix) for line in log.splitlines() if line.startswith(prefix)]
        if not cause and status == EXIT_USER_ERROR:
            raise UserError("\n".join(lines))
        if not cause and status == EXIT_BUG:
            lost = [f"its launcher ended with status {status}"]
        is_explained = not lost or OUT_OF_MEMORY in lost[-1]
        return "\n".join([*lines, *lost]), "" if is_explained else lost[-1]


@dataclasses.dataclass(frozen=True)
class TrialExit:
    """A trial whose command ended.

    Attributes:
      name: of the trial.
      status: as a shell gives it, 128 + N for signal N.
      log: the end of what it wrote, and what is known of its end.
      lost: where nothing is known of its end: why.
      host: the node of a cluster that it ran on; None is this machine.
    """

    name: str
    status: int
    log: str
    seconds: float
    lost: str = ""
    host: str | None = None


def read_log(path: str, begin: int) -> str:
    """Reads the end of what a process has written behind `begin`."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as log:
        log.seek(0, 2)
        log.seek(max(begin, log.tell() - _SHOWN_BYTES))
        return log.read().decode(errors="replace")
    return ""


def find_host(path: str, begin: int) -> str | None:
    """The node on which Ray has put a trial, by what its launcher has written behind `begin`; None for no cluster."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as log:
        log.seek(begin)
        if placed := _PLACED.search(log.read(_SHOWN_BYTES).decode(errors="replace")):
            return placed[1]
    return None
