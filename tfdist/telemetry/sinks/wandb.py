"""Logs a run to Weights & Biases: configuration, metrics by step, summary, how it ended.

Invariant: one run directory is one run of W&B, whichever process trains it, since its id is the run's. W&B's own
service process writes and sends; the console, signals and `wandb.run` stay as they are. The API key is W&B's affair:
WANDB_API_KEY, or what `wandb login` keeps.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.logs import Mirror
from tfdist.telemetry.facts import RunFacts
from tfdist.telemetry.records import load_record
from tfdist.telemetry.result import versions
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.telemetry.sinks.sink import FAILED, PREEMPTED, Tracker, check_client, describe_run

STEP = "step"
SETTINGS: Mapping[str, Any] = {
    "console": "off",
    "silent": True,
    "reinit": "create_new",  # leaves wandb.run alone
    "symlink": False,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_stats": True,  # the run's own samples have it
    "x_save_requirements": False,
}


class Wandb(Tracker):
    """A run of Weights & Biases.

    Args:
      project: made where there is none of that name.
      entity: the user or team; None is the key's own.
      name: None is the name of the run directory.
      mode: "offline" keeps it in RUN_DIR/wandb for `wandb sync`, "online" sends it.
    """

    def __init__(
        self, project: str = "tfdist", entity: str | None = None, name: str | None = None, mode: str = "offline"
    ) -> None:
        check_client("Wandb", "wandb", "wandb", {"project": project, "entity": entity, "name": name})
        if mode not in ("offline", "online"):
            raise UserError(f"Wandb.mode must be 'offline' or 'online'; received {mode!r}.")
        self._project, self._entity, self._name, self._mode = project, entity, name, mode
        self._mirror: Mirror | None = None

    def open(self, run: RunFacts) -> None:
        import wandb

        if self._mode == "online" and not wandb.login(prompt=False, verify=False):
            raise UserError("Wandb.mode is 'online', and there is no API key: set WANDB_API_KEY, or run wandb login.")
        self._directory = RunDirectory(run.directory)
        directory = self._directory.path
        if files.is_remote(directory):
            self._mirror = files.open_mirror(directory)
            directory = self._mirror.local
        self._run = wandb.init(
            id=run.run_id,
            resume="allow",
            project=self._project,
            entity=self._entity,
            name=self._name or os.path.basename(self._directory.path),
            mode=self._mode,
            dir=directory,
            config={**run.settings, "tfdist": describe_run(run) | {"versions": versions()}},
            allow_val_change=True,  # a resumption may change settings
            settings=wandb.Settings(**SETTINGS),
        )
        # W&B's own steps only grow, and a run that resumes from a checkpoint passes some steps again.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, numbers: Mapping[str, float], step: int, time: datetime.datetime) -> None:
        self._run.log({STEP: step, **numbers})

    def close(self, status: str) -> None:
        summary: dict[str, Any] = {"status": status}
        if status == "done" and (result := load_record(self._directory.result, dict[str, Any])) is not None:
            summary["result"] = result
        self._run.summary.update(summary)
        if status == PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if status in (FAILED, PREEMPTED) else 0)
        if self._mirror is not None:
            import wandb

            if wandb.run is None:  # no run of the user's is active, which this would end
                wandb.teardown()  # `finish` does not wait until the service has written the end of its log
            self._mirror.close()
