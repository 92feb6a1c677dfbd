"""The names in a run directory: the contract that other programs read.

Invariant: no other module spells one of these names. Whoever writes or reads a run gets its paths here.
"""

from __future__ import annotations

import dataclasses
import os

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.troubles import check_writable


class _Name:
    """A name in a run directory; of a `RunDirectory` it gives the path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> str:
        return files.join(run.path, self._name)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The paths of one run.

    Attributes:
      path: local, where `~` is understood, or `gs://BUCKET/DIRECTORY`.
      checkpoint_dir: the same of the checkpoints, where they do not lie in `path`.
    """

    path: str
    checkpoint_dir: str | None = None

    config = _Name("config.gin")
    starts = _Name("run.json")  # of which kind the run is, with which settings, and how often it was started
    rollbacks = _Name("rollbacks.json")  # the steps that failed, and what the run does in another way since
    tuned = _Name("tuned.json")  # what the run chose by trying
    result = _Name("result.json")
    evaluation = _Name("evaluation.json")  # what `--mode=evaluate` found last
    metrics = _Name("metrics.jsonl")
    events = _Name("events.jsonl")
    telemetry = _Name("telemetry")  # what each worker's process used, and what the run is known by
    run_id = _Name("telemetry/run_id")
    tensorboard = _Name("tensorboard")
    # what sources fitted on the training data, which evaluations need again: vocabularies, means
    fitted = _Name("fitted")
    export = _Name("export")
    model = _Name("export/model.keras")
    adapter = _Name("export/adapter.npz")  # what low-rank adaptation has learned, alone
    # what `--mode=export` wrote, and how far its outputs are from the model's
    export_report = _Name("export/report.json")
    predictions = _Name("predictions")  # the files of `--mode=predict`
    sweep = _Name("sweep.jsonl")  # the journal of `--mode=tune`: what each trial was, reported and came to
    # by which workers of a sweep over a cluster see that they share the directory with its chief
    sweep_mark = _Name(".sweep-chief")
    trials = _Name("trials.csv")  # the sweep's trials as a table
    report = _Name("report")  # the page that shows the run, or the sweep

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _expand_pattern(self.path))
        if self.checkpoint_dir is not None:
            object.__setattr__(self, "checkpoint_dir", _expand_pattern(self.checkpoint_dir))

    def create(self) -> None:
        """Makes the directory itself; raises UserError where nothing can be written."""
        check_writable(self.path)
        if self.checkpoint_dir is not None:
            check_writable(self.checkpoint_dir)
        if not files.is_remote(self.path):
            self._check_kinds()

    def _check_kinds(self) -> None:
        """Raises UserError where a directory stands in the place of a file, or a file in that of a directory."""
        for path in (self.config, self.result, self.evaluation, self.metrics, self.events):
            if files.is_dir(path):
                raise UserError(
                    f"{path} is a directory; a run has a file there. Move it away, or give another --run_dir."
                )
        for path in (self.telemetry, self.tensorboard, self.checkpoints, self.fitted, self.export):
            if files.exists(path) and not files.is_dir(path):
                raise UserError(
                    f"{path} is a file; a run has a directory there. Move it away, or give another --run_dir."
                )

    def worker_events(self, worker: int) -> str:
        """The events of a worker of the training; the chief's are what all share."""
        return files.join(self.path, f"events-worker-{worker}.jsonl") if worker else self.events

    def mode_events(self, mode: str, worker: int) -> str:
        """The events of a worker of another mode, which may run beside the training."""
        name = f"events-{mode}" if worker == 0 else f"events-{mode}-worker-{worker}"
        return files.join(self.path, f"{name}.jsonl")

    def all_events(self) -> list[str]:
        """The files of the events of a training's workers, the chief's first."""
        return [self.events, *_list_worker_files(self.path, "events-worker-")]

    def samples(self, worker: int) -> str:
        """What a worker's process used, and where its time went."""
        return files.join(self.telemetry, f"worker-{worker}.jsonl")

    def stacks(self, worker: int, moment: str) -> str:
        """The stacks of all workers when this one failed or hung."""
        return files.join(self.telemetry, f"stacks-worker-{worker}-{moment}.txt")

    def all_samples(self) -> list[str]:
        """The files of the samples of all workers."""
        return _list_worker_files(self.telemetry, "worker-")

    def profile(self, name: str, worker: int) -> str:
        """A worker's profile, where TensorBoard's plugin looks for it: one of several files of the run `name`."""
        return files.join(self.tensorboard, "plugins", "profile", name, f"worker-{worker}.xplane.pb")

    @property
    def checkpoints(self) -> str:
        return self.checkpoint_dir or files.join(self.path, "checkpoints")


def _expand_pattern(path: str) -> str:
    path = os.path.expanduser(os.fspath(path))
    if path == "~" or path.startswith("~/"):
        raise UserError(f"{path!r} names no directory, as this user has no home (HOME is not set). Write a whole path.")
    return path.rstrip("/") or path


def _list_worker_files(directory: str, beginning: str) -> list[str]:
    names = [name for name in files.list_names(directory) if name.startswith(beginning) and name.endswith(".jsonl")]
    return [files.join(directory, name) for name in names]
