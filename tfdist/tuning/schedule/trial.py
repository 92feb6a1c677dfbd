"""A trial while it is trained: what it has reported of the sweep's objective, and how its processes ended.

Invariant: a trial is a normal run directory, and what is said of it here can be read there. Starts nothing; `chief.py`
does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import (
    EXIT_BUG,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_IN_USE,
    EXIT_INTERRUPTED,
    EXIT_NOT_SAVED,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
    EXIT_STORE_UNAVAILABLE,
    EXIT_USER_ERROR,
    UserError,
)
from tfdist.launch.processes import EXIT_KILLED, OUT_OF_MEMORY
from tfdist.launch.supervise.watch import describe
from tfdist.storage import files
from tfdist.storage.contents import FileVersion
from tfdist.storage.troubles import DISK_FAILURES, is_disk_full
from tfdist.telemetry.records import as_point, parse_line
from tfdist.telemetry.registry import larger_is_better
from tfdist.telemetry.result import read_result
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.best import OBJECTIVE, VALIDATION, not_evaluated, not_reported
from tfdist.tuning.schedule.journal import DONE, FAILED, INFEASIBLE, PAUSED, STOPPED, TrialPoint

DISK_FAILED = "its disk failed: "  # begins why a trial was interrupted
MAX_CRASHES = 3  # of one trial, by its own doing, without an evaluation in between
_EXIT_HUNG_UP = 129  # 128 + SIGHUP
# Ends that say nothing of the values. A policy may let who has saved leave with 0.
_INTERRUPTIONS = (
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_NOT_SAVED,
    EXIT_PEER_LOST,
    EXIT_STORE_UNAVAILABLE,
    EXIT_INTERRUPTED,
    _EXIT_HUNG_UP,
    EXIT_KILLED,
)
_OUT_OF_MEMORY = ("ResourceExhaustedError", "OOM when allocating", "MemoryError", OUT_OF_MEMORY, "std::bad_alloc")


@dataclasses.dataclass(frozen=True)
class TuneObjective:
    """A metric and its better end, "min" or "max": `val_NAME` is that of the evaluation, any other name of training."""

    name: str
    direction: str

    @property
    def split(self) -> str:
        """The split of metrics.jsonl that has the objective."""
        return "eval" if self.name.startswith(VALIDATION) else "train"

    def find_value(self, metrics: Mapping[str, Any]) -> float | None:
        """Finds the objective among the metrics of its split; None where they have none, NaN where it is not finite."""
        value = metrics.get(self.name.removeprefix(VALIDATION))
        if isinstance(value, str):  # how json_text writes what is not finite
            return math.nan
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def build_error(self, metrics: Mapping[str, Any]) -> UserError:
        """The error for metrics of its split that do not have it."""
        if not metrics:
            return not_evaluated(OBJECTIVE, self.name)
        prefix = VALIDATION if self.split == "eval" else ""
        known = [f"{prefix}{name}" for name, value in metrics.items() if isinstance(value, int | float)]
        return not_reported(OBJECTIVE, self.name, known)


def build_objective(name: str, direction: str | None) -> TuneObjective:
    """The objective that is meant; without a direction its name tells it, or raises UserError."""
    if direction is None:
        better = larger_is_better(name.removeprefix(VALIDATION))
        if better is None:
            raise UserError(
                f"Whether {name!r} should grow or shrink is not clear. Write tune.direction = 'max' or 'min'."
            )
        direction = "max" if better else "min"
    return TuneObjective(name, direction)


@dataclasses.dataclass
class ActiveTrial:
    """A trial in the hands of the chief; `journal.Trial` is what became of it.

    Attributes:
      name: of its directory, "0007".
      values: by binding path.
      suggestion: its name in the oracle, another in each rung.
      rung: counted from 0; 0 where the search has none.
      epochs: that it is to have done at the end of the rung; None: until it ends by itself.
      active_seconds: that its processes ran in this rung.
      status: how it ended in this rung; None while it is to be run.
      message: why, or why its process was interrupted last; empty where that saved and left as it was told to.
      crashes: how often its process died by its own doing (a crash) since the last evaluation.
      host: the node of a cluster that its process ran on; None is this machine.
      is_stop_requested: whether the oracle has told it to end.
    """

    name: str
    directory: RunDirectory
    values: dict[str, Any]
    suggestion: str
    rung: int = 0
    epochs: int | None = None
    active_seconds: float = 0.0
    reports: dict[int, TrialPoint] = dataclasses.field(default_factory=dict)
    status: str | None = None
    objective: float | None = None
    message: str = ""
    crashes: int = 0
    host: str | None = None
    is_stop_requested: bool = False
    _seen: FileVersion | None = None
    _num_bytes: int = 0  # of metrics.jsonl that were read

    @property
    def epochs_done(self) -> int:
        """The last epoch that it has reported."""
        return max((report.epoch for report in self.reports.values()), default=0)

    def start_rung(self, suggestion: str, rung: int, epochs: int | None) -> None:
        """Begins the next rung."""
        self.suggestion, self.rung, self.epochs, self.active_seconds = suggestion, rung, epochs, 0.0
        self.status, self.objective, self.message = None, None, ""

    def new_reports(self, objective: TuneObjective, *, anew: bool = False) -> Iterator[TrialPoint]:
        """The evaluations since, each step once, whatever a resumed run does again.

        Args:
          anew: reads the file, whatever is known of its last change: another machine's, a shared file system may tell
            late, but what it holds when it is opened is what was there when it was closed.

        Raises:
          UserError: they do not have the objective.
        """
        try:
            version = files.stat(self.directory.metrics)
            if version == self._seen and not anew:
                return
            lines = self._new_lines(version.num_bytes, anew=anew)
        except FileNotFoundError:
            return
        self._seen = version
        for line in lines:
            point = as_point(parse_line(line))
            if point is None:
                raise UserError(
                    f"{self.directory.metrics} is damaged: a line is not a point of a training; received "
                    f"{line[:80]!r}. Remove {self.directory.path}, and the sweep trains it again."
                )
            if point.split != objective.split or point.step in self.reports:
                continue
            value = objective.find_value(point.metrics)
            if value is None:
                raise objective.build_error(point.metrics)
            report = TrialPoint(point.epoch, point.step, value)
            self.reports[point.step] = report
            self.crashes = 0
            yield report

    def _new_lines(self, num_bytes: int, *, anew: bool) -> list[str]:
        """The whole lines since, or all where the file was cut, written again, or is to be read `anew`."""
        path, first = self.directory.metrics, self._num_bytes
        data = b"" if anew or not 0 < first <= num_bytes else files.read_range(path, first - 1, num_bytes - first + 1)
        if data.startswith(b"\n"):
            data = data[1:]
        else:
            data, first = files.read(path), 0
        whole = data[: data.rfind(b"\n") + 1]
        self._num_bytes = first + len(whole)
        return whole.decode(errors="replace").split("\n")[:-1]

    def end(self, status: int, log: str, objective: TuneObjective, *, lost: str = "") -> bool:
        """Takes the end of the process; whether it ended the trial, rather than interrupt it.

        A kill from outside, a preemption, a lost worker or peer and a full disk interrupt it, however often they come.
        SIGKILL is taken for a kill from outside unless the log says that memory ran out.

        Args:
          status: the exit status.
          log: what the process wrote, and what is known of its end.
          lost: where nothing is known of the end of the process: why.

        Raises:
          UserError: the run has ended well and does not have the objective, or has left nothing at all.
        """
        self.message, error = lost, _find_error(log) if status in (EXIT_BUG, EXIT_USER_ERROR) else None
        if lost:
            return False
        is_done = files.exists(self.directory.result)
        is_paused = self.epochs is not None and self.epochs_done >= self.epochs
        if status == EXIT_DONE and not (is_done or self.reports or files.exists(self.directory.starts)):
            raise UserError(
                f"Trial {self.name} has ended well and left nothing in {self.directory.path}: the nodes do not share "
                "this directory. Give --run_dir=gs://BUCKET/DIRECTORY, or a directory of a file system that all have."
            )
        if status == EXIT_DONE and (is_done or is_paused):
            self.status = DONE if is_done else PAUSED
            self._score(self._final(objective), objective)
        elif status == EXIT_DIVERGED or (error is not None and _ran_out_of_memory(error)):
            self.status, self.message = INFEASIBLE, find_message(log)
        elif status == EXIT_IN_USE:
            self.message = "a process of a worker that was lost still trains it"
            return False
        elif error is not None and not log.strip() and is_disk_full(self.directory.path):
            self.message = f"{DISK_FAILED}it could not write what it said"
            return False
        elif error is not None and any(words in error for words in DISK_FAILURES):
            self.message = f"{DISK_FAILED}{find_message(log)}"
            return False
        elif error is not None:
            self.status, self.message = FAILED, find_message(log)
        elif self.is_stop_requested and self.reports:
            self.stop(objective)
        elif status == EXIT_KILLED and _ran_out_of_memory(log):
            return self._count_crash(f"{find_message(log)} (status {status})")
        elif status in _INTERRUPTIONS:
            has_saved = status in (EXIT_DONE, EXIT_PREEMPTED)
            self.message = "" if has_saved else f"its process ended with {describe(status)}"
            return False
        else:
            return self._count_crash(f"its process died with {describe(status)}")
        return True

    def stop(self, objective: TuneObjective) -> None:
        """Ends it early, with the last objective that it reported."""
        self.status, self.message = STOPPED, ""
        self._score(self._last(), objective)

    def _score(self, value: float | None, objective: TuneObjective) -> None:
        """Takes the objective that the trial has ended with; values that lead to no number are infeasible."""
        if value is None or not math.isfinite(value):
            self.status, self.message = INFEASIBLE, f"{objective.name} is {value} at the end"
        else:
            self.objective = value

    def _count_crash(self, message: str) -> bool:
        self.crashes += 1
        self.message = message
        if self.crashes < MAX_CRASHES:
            return False
        self.status, self.message = INFEASIBLE, f"its process died {self.crashes} times; the last time: {message}"
        return True

    def _last(self) -> float | None:
        return self.reports[max(self.reports)].objective if self.reports else None

    def _final(self, objective: TuneObjective) -> float | None:
        """The objective in the result of a run that is done; raises UserError where that is damaged or lacks it."""
        result = read_result(self.directory) if self.status == DONE else None
        if result is None:
            return self._last()
        metrics = dict(result.train_metrics if objective.split == "train" else result.eval_metrics)
        value = objective.find_value(metrics)
        if value is None and not self.reports:
            raise objective.build_error(metrics)
        return self._last() if value is None else value


def find_message(log: str) -> str:
    """Returns the last words of a process: its error message, or the last line of a traceback."""
    lines = [line for line in log.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if starts:
        return "\n".join(lines[starts[-1] :]).removeprefix("error: ")
    return lines[-1] if lines else "it said nothing"


def _find_error(log: str) -> str:
    """From where a log tells what ended its process: not what was printed before."""
    starts = [log.rfind(words) for words in ("\nerror: ", "\nTraceback ")]
    return log[max(0, *starts) :]


def _ran_out_of_memory(log: str) -> bool:
    return any(words in log for words in _OUT_OF_MEMORY)
