"""KerasTuner's trial, as far as a callback of its own gives it away: where it is kept, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory


def trial_of(callbacks: Sequence[Any]) -> tuple[str | None, dict[str, str]]:
    """Where KerasTuner keeps the trial that trains, one directory an execution, and its values as settings.

    None and no values where none of the callbacks is KerasTuner's.
    """
    for callback in callbacks:
        tuner, trial = getattr(callback, "tuner", None), getattr(callback, "trial", None)
        if tuner is None or trial is None:
            continue
        values = {f"hyperparameters.{name}": repr(value) for name, value in trial.hyperparameters.values.items()}
        execution = 0
        while files.exists(RunDirectory(path := f"{tuner.get_trial_dir(trial.trial_id)}/tfdist-{execution}").result):
            execution += 1
        return path, values
    return None, {}
