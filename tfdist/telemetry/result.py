"""Writes and reads result.json, the one file that says how a run ended.

Invariant: the file is written last and whole or not at all, so that a program which finds it may believe it. The chief
calls `write_result` at the end of `experiment.train`; whoever continues in a run directory calls `read_result`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.errors import UserError
from tfdist.requirements import installed_tensorflow
from tfdist.storage import files
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.run_directory import RunDirectory

TRAIN, TUNE = "train", "tune"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The keys of result.json, in its order.

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
      starts: each start of the run with its `time`, the `step` that it resumed from, and `lost_steps`: at least so many
        had been done after that step before, and were done again.
      goodput: the part of the chief's wall clock, over all starts, that went into computing steps that counted.
      seconds: where the wall clock of this process of the chief went, by `time_account.SHARES`.
      checkpoint_step: of the newest checkpoint; None where there is none.
      wall_seconds, examples_per_second: of this process.
      hardware: of the chief's process, see `training/run/hardware.py`.
      notes: what the figures depend on, in sentences.
    """

    status: str
    mode: str = TRAIN
    end_reason: str
    stopped_by: str | None
    strategy: str
    num_workers: int
    num_replicas: int
    global_batch_size: int
    steps: int
    epochs: int
    steps_per_epoch: int
    examples_seen: int
    train_metrics: Mapping[str, Any]
    eval_metrics: Mapping[str, Any]
    best: Mapping[str, Any] | None
    resumed_from_step: int | None
    starts: Sequence[Mapping[str, Any]]
    goodput: float | None
    seconds: Mapping[str, float]
    checkpoint_step: int | None
    wall_seconds: float
    examples_per_second: float
    hardware: Mapping[str, Any]
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=lambda: versions())


def write_result(run: RunDirectory, result: RunResult) -> None:
    """Replaces result.json."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    files.write_atomic(run.result, to_json(values, indent=2) + "\n")


def read_result(run: RunDirectory) -> dict[str, Any] | None:
    """What result.json holds, its `mode` TRAIN or TUNE; None where there is none.

    Raises:
      UserError: it is no result of a run.
    """
    if not files.exists(run.result):
        return None
    try:
        content = json.loads(files.read(run.result))
    except ValueError:
        content = None
    if isinstance(content, dict) and content.get("mode", TRAIN) == TUNE:
        return content
    if isinstance(content, dict) and all(isinstance(content.get(name), int) for name in ("steps", "epochs")):
        return {**content, "mode": TRAIN}
    raise UserError(
        f"{run.result} is not what a run writes at its end: it {_said(content)}. Remove it to continue with the run "
        "in this directory, or give another --run_dir."
    )


def _said(content: object) -> str:
    if not isinstance(content, dict):
        return "is no JSON object"
    return "has no 'steps' and 'epochs'" if content else "is empty"


def versions() -> dict[str, str]:
    """What the run stands on, read from the packages' metadata without importing them."""
    tensorflow = next(iter(installed_tensorflow().values()), None)
    found = {"python": platform.python_version(), "tensorflow": tensorflow or _version("tensorflow")}
    for package in ("keras", "numpy", "tfdist"):
        found[package] = _version(package)
    if "horovod" in sys.modules:
        found["horovod"] = _version("horovod")
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout, or a wheel of another name
        return str(getattr(sys.modules.get(package), "__version__", "not installed"))
