"""Writes and reads result.json, which says how a run ended, and run.json, which says where its starts resumed.

Invariant: result.json is written last and whole or not at all, so that a program which finds it may believe it. The
chief calls `write_result` at the end of `experiment.train`; whoever continues in a run directory calls `read_result`.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.requirements import find_version, installed_tensorflow
from tfdist.storage import files
from tfdist.telemetry.facts import now
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import Warn, load_if_whole, load_record, read_record
from tfdist.telemetry.run_directory import RunDirectory

TRAIN, TUNE = "train", "tune"
AT_MOST = ("checkpoint_overhead",)  # of a plan's targets; the others are at least to be reached


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of a run.

    Attributes:
      time: when it began to train, in UTC.
      step: where it resumed; 0 where it began.
      lost_steps: at least so many had been done after that step by starts before, and were done again.
    """

    time: datetime.datetime
    step: int
    lost_steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Starts:
    """The content of run.json.

    Attributes:
      settings: of the last start, by name.
      starts: of the run so far, the first one first.
      checkpoint_dir: of its checkpoints, where they are not in the run directory.
    """

    mode: str = TRAIN
    settings: Mapping[str, str]
    starts: Sequence[Start]
    checkpoint_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The keys of result.json, in its order; those with a default may be missing in an older one.

    Attributes:
      status: "done".
      mode: TRAIN; a sweep's result.json has TUNE here, and other keys.
      end_reason: "completed", or "early_stopping" where a callback ended the training.
      stopped_by: the class of that callback, where it can be told.
      steps, epochs, examples_seen: of the whole run.
      steps_per_epoch: of the training data.
      train_metrics: of the last epoch.
      eval_metrics: empty where nothing was evaluated.
      best: `metric`, `value`, `epoch` (from 1) and `step` of the best evaluation, or of the best epoch where nothing
        is evaluated; None where there was none.
      resumed_from_step: None for a start that began the run.
      starts: of the run.
      goodput: the part of the chief's wall clock, over all starts, that went into computing steps that counted.
      seconds: where the wall clock of this process of the chief went, by `time_account.SHARES`.
      checkpoint_step: of the newest checkpoint; None where there is none.
      wall_seconds, examples_per_second: of this process.
      hardware: of the chief's process, see `training/run/trainer.py`.
      performance_targets: of the plan in the run directory: "target", "measured" and whether it is "met".
      notes: what the figures depend on, in sentences.
    """

    status: str = "done"
    mode: str = TRAIN
    end_reason: str = "completed"
    stopped_by: str | None = None
    strategy: str | None = None
    num_workers: int | None = None
    num_replicas: int | None = None
    global_batch_size: int | None = None
    steps: int
    epochs: int
    steps_per_epoch: int | None = None
    examples_seen: int | None = None
    train_metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eval_metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    resumed_from_step: int | None = None
    starts: Sequence[Start] = ()
    goodput: float | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    checkpoint_step: int | None = None
    wall_seconds: float | None = None
    examples_per_second: float | None = None
    hardware: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    performance_targets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def write_result(run: RunDirectory, result: RunResult) -> None:
    """Replaces result.json."""
    files.write_atomic(run.result, to_json(result, indent=2) + "\n")


def check_targets(directory: RunDirectory, measured: Mapping[str, float | None]) -> dict[str, Any]:
    """The targets of the plan in a run directory that were measured, and whether they are met."""
    targets = (load_if_whole(directory.plan, dict[str, Any]) or {}).get("performance_targets")
    checked: dict[str, Any] = {}
    for name, value in measured.items():
        target = targets.get(name) if isinstance(targets, Mapping) else None
        if isinstance(target, int | float) and value is not None:
            is_met = value <= target if name in AT_MOST else value >= target
            checked[name] = {"target": target, "measured": value, "met": is_met}
    return checked


def read_mode(run: RunDirectory) -> str | None:
    """TRAIN or TUNE, by what result.json is of; None where there is none. Raises UserError where it is damaged."""
    result = load_record(run.result, dict[str, Any])
    return None if result is None else result.get("mode", TRAIN)


def read_result(run: RunDirectory) -> RunResult | None:
    """Reads result.json of a training; None where there is none. Raises UserError where it is damaged."""
    return load_record(run.result, RunResult)


def read_end(run: RunDirectory) -> RunResult | None:
    """Reads how a run ended; None where it has not, or a start after that result goes on with it."""
    result = load_if_whole(run.result, RunResult)
    if result is None:
        return None
    record = load_if_whole(run.starts, Starts)
    starts = () if record is None else record.starts
    return result if len(result.starts or starts) >= len(starts) else None


def read_starts(directory: RunDirectory, warn: Warn) -> Starts:
    """Reads what earlier starts left; nothing where there was none, or the file is damaged."""
    return read_record(directory.starts, Starts, warn) or Starts(settings={}, starts=())


def find_checkpoint_dir(path: str) -> str | None:
    """Where the last start of the run in `path` kept its checkpoints, where that is not in `path` itself."""
    found = load_if_whole(RunDirectory(path).starts, Starts)  # who takes the directory warns of a damaged one
    return None if found is None else found.checkpoint_dir


def record_start(
    directory: RunDirectory, settings: Mapping[str, str], earlier: Sequence[Start], *, step: int, lost_steps: int
) -> None:
    """Adds a start to the `earlier` ones."""
    starts = [*earlier, Start(now(), step, lost_steps)]
    content = Starts(settings=dict(settings), starts=starts, checkpoint_dir=directory.checkpoint_dir)
    files.write_atomic(directory.starts, to_json(content, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a run uses, from their metadata, without importing them."""
    tensorflow = next(iter(installed_tensorflow().values()), None)
    by_package = {"python": platform.python_version(), "tensorflow": tensorflow or _version("tensorflow")}
    for package in ("keras", "numpy", "tfdist"):
        by_package[package] = _version(package)
    if "horovod" in sys.modules:
        by_package["horovod"] = _version("horovod")
    return by_package


def _version(package: str) -> str:
    """The version of a package, or of the module of that name: in a checkout, or a wheel of another name."""
    return find_version(package) or str(getattr(sys.modules.get(package), "__version__", "not installed"))
