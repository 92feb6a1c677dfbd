"""The names in a run directory: the contract that other programs read, and what a damaged file means for the run.

Invariant: no other module spells one of these names. Whoever writes or reads a run gets its paths here.
"""

from __future__ import annotations

import dataclasses
import enum
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
    plan = _Name("plan.json")  # what `--mode=plan` expects of the run
    result = _Name("result.json")
    evaluation = _Name("evaluation.json")  # what `--mode=evaluate` found last
    metrics = _Name("metrics.jsonl")
    followed = _Name("metrics-follow.jsonl")  # the points of an evaluator beside the training
    best = _Name("best")  # the checkpoint that it found best
    events = _Name("events.jsonl")
    telemetry = _Name("telemetry")  # what each worker's process used, and what the run is known by
    run_id = _Name("telemetry/run_id")
    tensorboard = _Name("tensorboard")
    # what sources fitted on the training data, which evaluations need again: vocabularies, means
    fitted = _Name("fitted")
    export = _Name("export")
    model = _Name("export/model.keras")
    model_weights = _Name("export/model.weights.h5")  # in its place, where Keras cannot save the model
    adapter = _Name("export/adapter.npz")  # what low-rank adaptation has learned, alone
    # what `--mode=export` wrote, and how far its outputs are from the model's
    export_report = _Name("export/report.json")
    predictions = _Name("predictions")  # the files of `--mode=predict`
    sweep = _Name("sweep.jsonl")  # the journal of `--mode=tune`: what each trial was, reported and came to
    trials = _Name("trials.csv")  # the sweep's trials as a table
    report = _Name("report/index.html")  # the page that shows the run, or the sweep

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _expand_pattern(self.path))
        if self.checkpoint_dir is not None:
            object.__setattr__(self, "checkpoint_dir", _expand_pattern(self.checkpoint_dir))

    def create(self) -> None:
        """Makes the directory itself; raises UserError where nothing can be written."""
        check_writable(self.path)
        if self.checkpoint_dir is not None:
            check_writable(self.checkpoint_dir)

    def worker_events(self, worker: int, mode: str = "train") -> str:
        """The events of a worker of a mode, several of which may run at once; the chief's are what all share."""
        name = "events" if mode == "train" else f"events-{mode}"
        return files.join(self.path, f"{name}-worker-{worker}.jsonl" if worker else f"{name}.jsonl")

    def all_events(self) -> list[str]:
        """The files of the events of a training's workers, the chief's first."""
        return [self.events, *_list_worker_files(self.path, "events-worker-")]

    def samples(self, worker: int) -> str:
        """The file of the resources and the time that a worker's process used."""
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


class Policy(enum.Enum):
    """The treatment of a damaged file."""

    REMAKE = "made again, with a warning"
    KEEP = "kept as `NAME.damaged`, with a warning"
    REFUSE = "refused with status 2; nothing is removed"


@dataclasses.dataclass(frozen=True)
class RunFile:
    """A file of a run directory, or a directory of files, whose name ends with a slash.

    Attributes:
      content: what it holds.
      advice: what is lost with it, or what to do.
      mode: whose lease covers it.
    """

    name: str
    content: str
    policy: Policy
    advice: str
    mode: str = "train"


_COPY = "Restore it from a copy of the run"
RUN_FILES = (
    RunFile(
        "checkpoints/",
        "the state of the training",
        Policy.REFUSE,
        "A damaged checkpoint is passed over for an older one, with a warning. Where none is whole: restore one, or "
        "move checkpoints/ away to begin again.",
    ),
    RunFile(
        "rollbacks.json",
        "the steps that failed, and what the run does differently since",
        Policy.REFUSE,
        f"{_COPY}, or remove it: then the run trains as if no step had failed.",
    ),
    RunFile(
        "fitted/",
        "what was fitted to the training data",
        Policy.REFUSE,
        f"{_COPY}, or remove it: then it is fitted to the present data.",
    ),
    RunFile(
        "hyperparameters.json",
        "what build(hp) was called with",
        Policy.REFUSE,
        f"{_COPY}, or remove it and train again.",
    ),
    RunFile(
        "config.gin", "the experiment", Policy.REFUSE, "A training does not read it. For other modes give --gin_file."
    ),
    RunFile(
        "result.json",
        "how the run ended",
        Policy.REFUSE,
        "Remove it to continue with the run in this directory, or give another --run_dir.",
    ),
    RunFile("export/model.keras", "the trained model", Policy.REFUSE, "Write evaluate.weights = 'last'."),
    RunFile("export/model.weights.h5", "its weights, where it has no get_config or call", Policy.REFUSE, "The same."),
    RunFile("export/adapter.npz", "the adapter of the trained model", Policy.REFUSE, "Use model.keras."),
    RunFile(
        "sweep.jsonl",
        "what happened in the sweep",
        Policy.REFUSE,
        f"{_COPY}, or give another --run_dir. Half a last line is removed.",
        mode="tune",
    ),
    RunFile("best.gin", "the best trial's experiment", Policy.REMAKE, "Nothing is lost.", mode="tune"),
    RunFile("trials.csv", "the trials as a table", Policy.REMAKE, "Nothing is lost.", mode="tune"),
    RunFile(
        "run.json", "the starts of the run", Policy.KEEP, "Goodput and the rate of failures count from this start on."
    ),
    RunFile("metrics.jsonl", "the logged points", Policy.KEEP, "Lines that can be read stay."),
    RunFile(
        "events*.jsonl",
        "the events, a file for each worker and mode",
        Policy.KEEP,
        "Readers skip lines that cannot be read; nothing is removed.",
    ),
    RunFile(
        "telemetry/",
        "what each process used, and the run's ID",
        Policy.KEEP,
        "As events. Without run_id, trackers see another run.",
    ),
    RunFile("tuned.json", "what 'auto' came to", Policy.REMAKE, "The run chooses again."),
    RunFile("xla_cache/", "what XLA has compiled", Policy.REMAKE, "XLA compiles again."),
    RunFile("fast_check/", "a check in progress", Policy.REMAKE, "Emptied before each check.", mode="fast_check"),
    RunFile("find_rate/", "a range test in progress", Policy.REMAKE, "Emptied before each test.", mode="find_rate"),
    RunFile("find_rate.json", "the last range test", Policy.REMAKE, "Repeat the test.", mode="find_rate"),
    RunFile("evaluation.json", "the last evaluation", Policy.REMAKE, "Evaluate again.", mode="evaluate"),
    RunFile(
        "metrics-follow.jsonl",
        "the points of `--follow`",
        Policy.KEEP,
        "Checkpoints without a point are evaluated again.",
        mode="follow",
    ),
    RunFile("best/", "the best checkpoint by `--follow`", Policy.KEEP, "A better one replaces it.", mode="follow"),
    RunFile(
        "predictions/",
        "the last predictions",
        Policy.REMAKE,
        "Parts that are not as they were written are predicted again.",
        mode="predict",
    ),
    RunFile("export/saved_model/", "the model for servers", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("export/model.tflite", "the model for LiteRT", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("export/model.onnx", "the model for ONNX", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("export/report.json", "how far exports are from the model", Policy.REMAKE, "Export again.", mode="export"),
    RunFile("plan.json", "the last plan", Policy.REMAKE, "Plan again.", mode="plan"),
    RunFile("plan.gin", "the same as settings", Policy.REMAKE, "Plan again.", mode="plan"),
)
