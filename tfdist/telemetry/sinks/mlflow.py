"""Logs a run to MLflow: parameters, metrics by step, tags, artifacts, status.

Invariant: one run directory is one run of MLflow, whichever process trains it; it is found by its tag `tfdist.run_id`.
Calls the client alone: there is no active run, and nothing is logged but what stands here.
"""

from __future__ import annotations

import datetime
import os
import re
import time as clock
from collections.abc import Mapping
from typing import Any

from tfdist.storage import files
from tfdist.telemetry.facts import Event, RunFacts
from tfdist.telemetry.result import versions
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.telemetry.sinks.sink import FAILED, Tracker, check_client, describe_run

RUN_ID, ERROR = "tfdist.run_id", "tfdist.error"
SEND_SECONDS, SEND_METRICS = 5.0, 1000  # the latter is MLflow's limit of a request
MAX_NAME, MAX_PARAM, MAX_TAG = 250, 6000, 5000  # characters that servers of all releases take


class MLflow(Tracker):
    """A run of MLflow.

    Args:
      tracking_uri: of the server, "http://127.0.0.1:5000", or what else MLflow takes; None is MLflow's own choice,
        MLFLOW_TRACKING_URI.
      experiment: made where there is none of that name.
      run_name: None is the name of the run directory.
    """

    def __init__(
        self, tracking_uri: str | None = None, experiment: str = "tfdist", run_name: str | None = None
    ) -> None:
        texts = {"tracking_uri": tracking_uri, "experiment": experiment, "run_name": run_name}
        check_client("MLflow", "mlflow", "mlflow-skinny", texts)
        self.dashboard_url = tracking_uri
        self._tracking_uri, self._experiment, self._run_name = tracking_uri, experiment, run_name
        self._metrics: list[Any] = []
        self._sent_at = clock.monotonic()

    def open(self, run: RunFacts) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag
        from mlflow.environment_variables import MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT

        MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)  # standard output is the run's
        self._directory = RunDirectory(run.directory)
        self._client = MlflowClient(tracking_uri=self._tracking_uri)
        experiment = self._experiment_id()
        runs = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'", max_results=1)
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
            if ERROR in runs[0].data.tags:
                self._client.delete_tag(runs[0].info.run_id, ERROR)
        else:
            name = self._run_name or os.path.basename(self._directory.path)
            runs = [self._client.create_run(experiment, run_name=name, tags={RUN_ID: run.run_id})]
        self._id, logged = runs[0].info.run_id, runs[0].data.params
        facts = describe_run(run) | {f"versions.{package}": version for package, version in versions().items()}
        params = {_name(name): value[:MAX_PARAM] for name, value in run.settings.items()}
        self._client.log_batch(
            self._id,
            # MLflow never changes a parameter: what a resumption changes stays as it was first.
            params=[Param(name, value) for name, value in params.items() if name not in logged],
            tags=[RunTag(f"tfdist.{name}", str(value)) for name, value in facts.items()],
        )

    def event(self, event: Event) -> None:
        if event.level == "error":
            text = event.message or event.details.get("error") or event.name
            self._client.set_tag(self._id, ERROR, str(text)[:MAX_TAG])

    def log(self, numbers: Mapping[str, float], step: int, time: datetime.datetime) -> None:
        from mlflow.entities import Metric

        milliseconds = int(time.timestamp() * 1000)
        self._metrics += [Metric(_name(name), value, milliseconds, step) for name, value in numbers.items()]
        if len(self._metrics) >= SEND_METRICS or clock.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send()

    def close(self, status: str) -> None:
        self._send()
        directory = self._directory
        for path in (directory.config, directory.result, directory.events):
            if files.exists(path):
                self._client.log_text(self._id, files.read(path).decode(errors="replace"), os.path.basename(path))
        self._client.set_tag(self._id, "tfdist.status", status)
        ends = {"done": "FINISHED", FAILED: "FAILED"}  # a run that was preempted or paused is to be resumed
        self._client.set_terminated(self._id, ends.get(status, "KILLED"))

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(self._experiment))
        except MlflowException:  # it is there
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def _send(self) -> None:
        self._client.log_batch(self._id, metrics=self._metrics)
        self._metrics, self._sent_at = [], clock.monotonic()


def _name(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^/\w.\- :]", "_", name)[:MAX_NAME]
