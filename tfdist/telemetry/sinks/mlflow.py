"""Tells a run to MLflow: parameters, metrics by step, tags, artifacts, status.

Invariant: one run directory is one run of MLflow, whichever process trains it; it is found by its tag `tfdist.run_id`.
Calls the client alone: there is no active run, and nothing is logged but what stands here. A gin file names it,
`train.sinks = [@mlflow.MLflow()]`.
"""

from __future__ import annotations

import datetime
import os
import re
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.facts import Event, Point, RunFacts, Sample
from tfdist.telemetry.result import versions
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.telemetry.sinks.sink import (
    FAILED,
    Sink,
    check_installed,
    check_texts,
    numbers_of_point,
    numbers_of_sample,
)

if TYPE_CHECKING:
    from mlflow.entities import Metric

RUN_ID, ERROR = "tfdist.run_id", "tfdist.error"
SEND_SECONDS = 5.0
SEND_METRICS = 1000  # MLflow's limit of a request
_MOST_CHARACTERS = {"name": 250, "param": 6000, "tag": 5000}  # what servers of all releases take
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")


class MLflow(Sink):
    """A run of MLflow.

    Args:
      tracking_uri: of the server, "http://127.0.0.1:5000", or what else MLflow takes; None is MLflow's own choice,
        MLFLOW_TRACKING_URI.
      experiment: made where there is none of that name.
      run_name: None is the name of the run directory.
      model: whether export/model.keras is among the artifacts.

    Raises:
      UserError: one of these cannot be meant, or MLflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "tfdist",
        run_name: str | None = None,
        model: bool = True,
    ) -> None:
        check_texts("MLflow", {"tracking_uri": tracking_uri, "experiment": experiment, "run_name": run_name})
        if not isinstance(model, bool):
            raise UserError(f"MLflow.model must be True or False; received {model!r}.")
        check_installed("mlflow", "mlflow-skinny", "mlflow", "mlflow.MLflow")
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._model = model
        self._metrics: list[Metric] = []
        self._sent_at = time.monotonic()

    def open(self, run: RunFacts) -> None:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT

        MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)  # standard output is the run's
        self._directory = RunDirectory(run.directory)
        self._client = MlflowClient(tracking_uri=self._tracking_uri)
        experiment = self._experiment_id()
        found = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.run_id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            if ERROR in found[0].data.tags:
                self._client.delete_tag(self._id, ERROR)
        else:
            name = self._run_name or os.path.basename(self._directory.path)
            tags = {RUN_ID: run.run_id}
            self._id = self._client.create_run(experiment, run_name=name, tags=tags).info.run_id
        self._describe(run, logged=found[0].data.params if found else {})

    def event(self, event: Event) -> None:
        if event.level == "error":
            said = event.message or event.details.get("error") or event.name
            self._client.set_tag(self._id, ERROR, str(said)[: _MOST_CHARACTERS["tag"]])

    def point(self, point: Point) -> None:
        self._add(numbers_of_point(point), point.step, point.time)

    def sample(self, sample: Sample) -> None:
        self._add(numbers_of_sample(sample), sample.step or 0, sample.time)

    def close(self, status: str) -> None:
        self._send()
        directory = self._directory
        for path in (directory.config, directory.result, directory.events):
            self._store(path)
        if self._model:
            self._store(directory.model, folder="export")
        self._client.set_tag(self._id, "tfdist.status", status)
        ends = {"done": "FINISHED", FAILED: "FAILED"}  # a run that was preempted or paused is to be resumed
        self._client.set_terminated(self._id, ends.get(status, "KILLED"))

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(self._experiment))
        except MlflowException:  # it is there
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                raise
            return str(found.experiment_id)

    def _describe(self, run: RunFacts, *, logged: Mapping[str, str]) -> None:
        """Parameters and tags. MLflow never changes a parameter: what a resumption changes stays as it was first."""
        from mlflow.entities import Param, RunTag

        length = _MOST_CHARACTERS["param"]
        named = {_name(name): value[:length] for name, value in run.settings.items()}
        tags = {"tfdist.strategy": run.strategy, "tfdist.directory": run.directory, "tfdist.start": str(run.start)}
        tags |= {"tfdist.num_workers": str(run.num_workers), "tfdist.num_replicas": str(run.num_replicas)}
        tags |= {f"tfdist.versions.{package}": version for package, version in versions().items()}
        self._client.log_batch(
            self._id,
            params=[Param(name, value) for name, value in named.items() if name not in logged],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _add(self, numbers: Mapping[str, float], step: int, when: datetime.datetime) -> None:
        from mlflow.entities import Metric

        milliseconds = int(when.timestamp() * 1000)
        self._metrics += [Metric(_name(name), value, milliseconds, step) for name, value in numbers.items()]
        if len(self._metrics) >= SEND_METRICS or time.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send()

    def _send(self) -> None:
        self._client.log_batch(self._id, metrics=self._metrics)
        self._metrics, self._sent_at = [], time.monotonic()

    def _store(self, path: str, folder: str | None = None) -> None:
        """Makes a file of the run an artifact, if it is there."""
        if not files.exists(path):
            return
        with tempfile.TemporaryDirectory(prefix="tfdist-mlflow-") as scratch:
            local = path
            if files.is_remote(path):
                local = os.path.join(scratch, os.path.basename(path))
                with open(local, "wb") as copy:
                    copy.write(files.read(path))
            self._client.log_artifact(self._id, local, folder)


def _name(name: str) -> str:
    """A name as MLflow takes it."""
    return _NOT_IN_NAMES.sub("_", name)[: _MOST_CHARACTERS["name"]]
