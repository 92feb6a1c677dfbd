"""Writes result.json, the one file that says how a run ended.

Invariant: the file is written last and whole or not at all, so that a program which finds it may believe it. The chief
calls `write_result` at the end of `experiment.train`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.storage import files
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.run_directory import RunDirectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The keys of result.json, in its order.

    `status` is "done", or what ended the run before; `eval_metrics` is empty where nothing was evaluated;
    `resumed_from_step` is None for a run that started afresh; `wall_seconds` and `examples_per_second` are this
    process's, `steps`, `epochs` and `examples_seen` the whole run's; `notes` say what the figures depend on.
    """

    status: str
    strategy: str
    num_workers: int
    num_replicas: int
    global_batch_size: int
    steps: int
    epochs: int
    examples_seen: int
    train_metrics: Mapping[str, Any]
    eval_metrics: Mapping[str, Any]
    resumed_from_step: int | None
    wall_seconds: float
    examples_per_second: float
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=lambda: versions())


def write_result(run: RunDirectory, result: RunResult) -> None:
    """Replaces result.json."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    files.write_atomic(run.result, to_json(values, indent=2) + "\n")


def versions() -> dict[str, str]:
    """What the run stands on, read from the packages' metadata without importing them."""
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "keras", "numpy", "tfdist"):
        found[package] = _version(package)
    if "horovod" in sys.modules:
        found["horovod"] = _version("horovod")
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout, or a wheel of another name
        return str(getattr(sys.modules.get(package), "__version__", "not installed"))
