"""Which metrics a run reports, which callbacks monitor them, and the best that it has come to by one of them.

Invariant: it follows from reported numbers alone, which are the same on every worker, so all of them agree on it
without a word; where a run resumes, the chief tells what was before. The loop asks after each evaluation and each
epoch; a checkpoint keeps it, as part of the outcome.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from tfdist.checkpoint import catalog
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import UserError, suggest
from tfdist.keras_patches.patches import Patches
from tfdist.telemetry.records import Unreadable, as_point, read_lines
from tfdist.telemetry.registry import larger_is_better
from tfdist.training.run.eval_sets import prefix_results
from tfdist.training.run.train_settings import TrainSettings

if TYPE_CHECKING:  # sweeps use this without TensorFlow
    from tfdist.tasks.task import Task
    from tfdist.telemetry.run_directory import RunDirectory
    from tfdist.training.loop.boundaries import Boundaries
    from tfdist.training.step.metrics import MetricGroup


KEEP_BEST = f"{CheckpointPolicy.NAME}.keep_best is"


@dataclasses.dataclass(frozen=True)
class BestMetric:
    """The metric by which evaluations are compared.

    Attributes:
      metric: its name, `val_NAME` for one of the evaluation.
      is_larger_better: which way.
      policy: by which each new best is backed up; None: it is not.
    """

    metric: str
    is_larger_better: bool
    policy: CheckpointPolicy | None = None

    @property
    def is_of_evaluation(self) -> bool:
        """Whether an evaluation reports the metric."""
        return self.metric.startswith(VALIDATION)

    def newest(self, best: Mapping[str, Any] | None, logs: Mapping[str, Any], *, step: int, epoch: int) -> Any:
        """Returns the best now: `best` itself, or a new one out of `logs`, as result.json has it. `epoch` is from 1.

        Raises:
          UserError: `logs` do not have the metric, whose best is to be backed up, though they have the loss (which is
        left out where examples weigh nothing in all).
        """
        value = logs.get(self.metric)
        if not isinstance(value, int | float):
            if self.policy is not None and (f"{VALIDATION}loss" if self.is_of_evaluation else "loss") in logs:
                raise not_reported(KEEP_BEST, self.metric, [n for n, v in logs.items() if isinstance(v, int | float)])
            return best
        known = math.nan if best is None else best["value"]
        if math.isnan(value) or (value <= known if self.is_larger_better else value >= known):
            return best
        return {"metric": self.metric, "value": value, "epoch": epoch, "step": step}

    def recall(self, best: Any, directory: RunDirectory, boundaries: Boundaries, *, until: int) -> tuple[Any, Any]:
        """Returns the best of a run, of its points where `best` is none by this metric, and that of its checkpoints."""
        if best is None or best["metric"] != self.metric:
            best, split, name = None, "eval" if self.is_of_evaluation else "train", self.metric.removeprefix(VALIDATION)
            for point in filter(None, map(as_point, read_lines(directory.metrics, Unreadable()))):
                is_whole = self.is_of_evaluation or boundaries.ends_epoch(point.step)
                value = point.metrics.get(name)
                if point.split == split and is_whole and isinstance(value, int | float):
                    best = self.newest(best, {self.metric: value}, step=point.step, epoch=point.epoch)
        return best, self.read_best(directory.checkpoints, until=until)

    def read_best(self, directory: str, *, until: float = math.inf) -> dict[str, Any] | None:
        """Returns the best of the checkpoints of steps up to `until`; None: none is kept for its value."""
        if self.policy is None:
            return None
        entries = catalog.list_checkpoints(directory)
        best = catalog.find_best((entry for entry in entries if entry.step <= until), self.policy)
        return None if best is None else {"metric": self.metric, "value": best[0]}


def find_best_metric(settings: TrainSettings) -> BestMetric:
    """Finds the metric that compares a run's evaluations: `keep_best`, else what a callback monitors, else the loss."""
    policy, evaluates = settings.policy, settings.eval_data is not None
    if policy is not None and policy.keep_best is not None:
        return BestMetric(policy.keep_best, policy.larger_is_better, policy)
    for callback in settings.callbacks:
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str) or (monitor.startswith(VALIDATION) and not evaluates):
            continue
        mode = getattr(callback, "mode", "auto")
        is_larger_better = larger_is_better(monitor) if mode not in ("min", "max") else mode == "max"
        if is_larger_better is not None:
            return BestMetric(monitor, is_larger_better)
    return BestMetric("val_loss" if evaluates else "loss", False)


_SETTERS = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def check_monitors(
    settings: TrainSettings, reported: ReportedMetrics, optimizer: keras.optimizers.Optimizer, boundaries: Boundaries
) -> None:
    """Raises UserError where `keep_best` or a callback watches what is not reported, without what callbacks add.

    So it does where an epoch ends without it, or a callback sets a learning rate that a schedule of `optimizer` gives.
    """
    policy = settings.policy
    if policy is not None and policy.keep_best is not None:
        reported.check(KEEP_BEST, policy.keep_best)
        _ = policy.larger_is_better
    for callback in settings.callbacks:
        if not type(callback).__module__.startswith("keras."):
            reported = dataclasses.replace(reported, names=None)
        _check_rate(callback, optimizer)
        monitor, watches = _monitor(callback), f"{type(callback).__name__} monitors"
        reported.check(watches, monitor)
        by_steps = isinstance(settings.eval_every, str) and (monitor or "").startswith(VALIDATION)
        if by_steps and not boundaries.evaluates(boundaries.steps_per_epoch):
            raise UserError(
                f"{watches} {monitor!r} at the end of each epoch, whose {boundaries.steps_per_epoch:,} steps "
                f"train.eval_every = {settings.eval_every!r} does not divide. Write train.eval_every = 1, or a number "
                "of steps that divides them."
            )


def direct_monitors(callbacks: Sequence[keras.callbacks.Callback], sets: Sequence[str], patches: Patches) -> None:
    """Tells Keras's callbacks which way a metric of another set than the first is better, where its name tells."""
    for callback in callbacks:
        monitor = _monitor(callback)
        if monitor is not None and monitor.startswith(tuple(f"{VALIDATION}{name}_" for name in sets[1:])):
            is_larger_better = larger_is_better(monitor)
            if callback.mode == "auto" and is_larger_better is not None:
                patches.replace(callback, mode="max" if is_larger_better else "min")


def _check_rate(callback: keras.callbacks.Callback, optimizer: keras.optimizers.Optimizer) -> None:
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if isinstance(callback, _SETTERS) and isinstance(getattr(optimizer, "_learning_rate", None), schedule):
        raise UserError(
            f"{type(callback).__name__} sets the learning rate, which a schedule of {type(optimizer).__name__} gives "
            "already. Leave one of them out: write a number for learning_rate, or remove the callback."
        )


def _monitor(callback: keras.callbacks.Callback) -> str | None:
    """The metric that one of Keras's callbacks watches; None where it watches none."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not callback.save_best_only:
        return None
    monitor = getattr(callback, "monitor", None)
    watches = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
    return monitor if isinstance(callback, watches) and isinstance(monitor, str) else None


VALIDATION = "val_"  # before the names of the evaluation
OBJECTIVE = "tune.objective is"


@dataclasses.dataclass(frozen=True)
class ReportedMetrics:
    """The metrics that a training reports.

    Attributes:
      names: its own metrics, and of how many numbers each is; None where one does not tell before it counts.
      sets: of an evaluation, whose first reports the same names with `val_` before them, and others `val_SET_`.
    """

    names: Mapping[str, int] | None
    sets: Sequence[str]

    def check(self, setting: str, name: str | None) -> None:
        """Raises UserError where a setting, such as "tune.objective is", names what is not reported as one number."""
        if name is None:
            return
        if name.startswith(VALIDATION) and not self.sets:
            raise not_evaluated(setting, name)
        if self.names is None:
            return
        evaluated = prefix_results(dict.fromkeys(self.sets, self.names)) if self.sets else {}
        known = {**self.names, **{f"{VALIDATION}{each}": n for each, n in evaluated.items()}}
        if name not in known:
            raise not_reported(setting, name, list(known))
        if known[name] > 1:
            raise UserError(
                f"{setting} {name!r}, which gives {known[name]:,} numbers. Name a metric of one number, such as "
                "keras.metrics.F1Score(average='macro') gives."
            )


def reported_by(metrics: MetricGroup, task: Task, *, sets: Sequence[str]) -> ReportedMetrics:
    """Returns the metrics that a training with these metrics and this task's loss reports.

    Raises:
      UserError: two sets of an evaluation would report one name.
    """
    names = metrics.reported_names()
    losses = dict.fromkeys(["loss", *(f"{term}_loss" for term in task.term_names())], 1)
    own = None if names is None else losses | names
    for taken in {f"{name}_{each}" for name in sets[1:] for each in own or ()} & {*(own or ())}:
        raise UserError(f"A set of train.eval_data would have the metric {taken!r}, as another has. Rename the set.")
    return ReportedMetrics(own, sets)


def not_evaluated(setting: str, name: str) -> UserError:
    """The error for a metric of an evaluation that there is none of."""
    return UserError(
        f"{setting} {name!r}, and nothing is evaluated. Write train.eval_data, or name a metric of the training, such "
        "as 'loss'."
    )


def not_reported(setting: str, name: str, known: Sequence[str]) -> UserError:
    """The error for a metric that nothing reports, with those that something does."""
    return UserError(f"{setting} {name!r}, which is not reported.{suggest(name, known)} Reported: {', '.join(known)}.")
