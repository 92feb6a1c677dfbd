"""The steps at which a call of the step function ends, how far a loop has come, and what workers want of the next one.

Invariant: boundaries follow from the settings alone, so every worker meets the same ones. An outcome is made of
numbers, strings and dicts of them, as a checkpoint keeps it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, is_whole_number
from tfdist.recipes.lengths import is_length, parse_length
from tfdist.settings.checks import COUNT, Check, or_none
from tfdist.settings.declaration import Settings, setting
from tfdist.strategies.strategy import Strategy


def _are_epochs(value: Any) -> bool:
    return all(map(is_whole_number, value if isinstance(value, list | tuple | set) else [value]))


def _steps_in(value: Any) -> int | None:
    """The number of steps in a text, '500 steps'; None for anything else."""
    length = parse_length("", value) if isinstance(value, str) and is_length(value) else None
    return int(length.amount) if length is not None and length.unit == "steps" and length.amount else None


EPOCHS = Check("a number of epochs, or a list of the numbers of epochs", _are_epochs)
EVALUATIONS = Check(
    "a number of epochs, a list of the numbers of epochs, or '500 steps'",
    lambda value: _are_epochs(value) or _steps_in(value) is not None,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthSettings(Settings):
    """The length of a run, and its evaluations and saves on the way."""

    epochs: int | None = setting(
        "passes over the training examples; of `epochs` and `steps` the first ends the run",
        or_none(COUNT),
        None,
        may_change=True,
    )
    steps: int | None = setting("optimizer updates", or_none(COUNT), None, may_change=True)
    stop_after_epochs: int | None = setting(
        "saves and exits after so many epochs; a later start with more, or without, resumes. Schedules are those of "
        "the whole run",
        or_none(COUNT),
        None,
        may_change=True,
    )
    steps_per_epoch: int | None = setting(
        "updates of an epoch, through which passes over the data continue; None is one pass",
        or_none(COUNT),
        None,
    )
    eval_every: int | str | Collection[int] = setting(
        "evaluates after so many epochs, after those in a list, counted from 1, or every '500 steps'; also at the end",
        EVALUATIONS,
        1,
    )
    log_every_steps: int | None = setting(
        "more points in metrics.jsonl; None logs each epoch", or_none(COUNT), None, may_change=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is None and self.steps is None:
            raise UserError(f"{self.NAME} needs an end: write {self.NAME}.epochs = 10 or {self.NAME}.steps = 1000.")

    def total_steps(self, steps_per_epoch: int) -> int:
        """The last step: with epochs and steps, what comes first."""
        return min(limit for limit in (self.steps, self.epochs and self.epochs * steps_per_epoch) if limit)

    def boundaries(self, steps_of_pass: int) -> Boundaries:
        """The steps at which calls end, where a pass over the training data takes so many."""
        return Boundaries(self, self.steps_per_epoch or steps_of_pass)


@dataclasses.dataclass(frozen=True)
class Boundaries:
    """The steps at which a call has to end.

    Args:
      settings: say when the run ends, evaluates and logs.
      steps_per_epoch: of the training data, or as many as are to count as an epoch.
    """

    settings: LengthSettings
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """The last step of the run."""
        return self.settings.total_steps(self.steps_per_epoch)

    @property
    def last_step(self) -> int:
        """The step at which this process ends, or leaves the saved run for another time."""
        epochs = self.settings.stop_after_epochs
        return self.total_steps if epochs is None else min(self.total_steps, epochs * self.steps_per_epoch)

    @property
    def num_epochs(self) -> int:
        """The number of epochs, the last of which may be cut off."""
        return self.epoch_of(self.total_steps)

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 1, that the step which was done last belongs to."""
        return -(-step // self.steps_per_epoch)

    def next_after(self, step: int) -> int:
        """The first boundary after a step."""
        periods = [self.steps_per_epoch, _steps_in(self.settings.eval_every), self.settings.log_every_steps]
        return min(self.last_step, *((step // period + 1) * period for period in periods if period))

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch ends at a step, the last one of the run included."""
        return step % self.steps_per_epoch == 0 or step == self.total_steps

    def evaluates(self, step: int, *, stops: bool = False) -> bool:
        """Whether an evaluation is due at a step; `stops`: the run, and so the epoch, ends with it."""
        every = self.settings.eval_every
        if isinstance(every, str):
            return stops or step % (_steps_in(every) or 1) == 0 or step == self.total_steps
        number = self.epoch_of(step)
        is_asked = number % every == 0 if isinstance(every, int) else number in every
        return (stops or self.ends_epoch(step)) and is_asked

    def logs(self, step: int) -> bool:
        """Whether a point is due at a step within an epoch."""
        period = self.settings.log_every_steps
        return period is not None and step % period == 0 and not self.ends_epoch(step)


TARGET_SECONDS = 0.1
LONGEST_CALL = 4096


class Pace:
    """Steps per call: given, or doubled from 1 until a call takes about 0.1 s.

    A longer call saves a return to Python per step, a shorter one lets the loop react sooner. All workers follow the
    chief's clock, so that they call alike; once found, the number stays.
    """

    def __init__(self, strategy: Strategy, steps_per_call: int | None) -> None:
        self._strategy = strategy
        self.steps_per_call = steps_per_call or 1
        self.settled = steps_per_call is not None
        self._traced = False

    def observe(self, steps: int, seconds: float) -> None:
        """Takes note of a call of `steps` steps that took `seconds`. A collective until the number is settled."""
        if self.settled:
            return
        if not self._traced:  # the first call traces and compiles; its time tells nothing
            self._traced = True
            return
        if steps < self.steps_per_call:  # cut short by a boundary; every worker sees that alike
            return
        seconds = float(self._strategy.from_chief([seconds])[0])
        if seconds >= TARGET_SECONDS / 2 or self.steps_per_call >= LONGEST_CALL:
            self.settled = True
        else:
            self.steps_per_call *= 2


@dataclasses.dataclass
class Outcome:
    """The end of a loop; `best` as `BestMetric.newest` returns it; `weightless` steps of the whole run."""

    step: int = 0
    stopped_early: bool = False
    train_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluated_at: int = -1
    paused: bool = False
    best: dict[str, Any] | None = None
    weightless: int = 0


def mean_losses(sums: Sequence[float], term_names: Sequence[str]) -> dict[str, float]:
    """The losses to report, of what `Totals.sums` holds; none where nothing has weighed anything."""
    loss_sum, weight, weightless, *term_sums = sums
    if weightless and not weight:
        return {}
    weight = weight or float("nan")
    terms = zip(term_names, term_sums, strict=True)
    return {"loss": loss_sum / weight} | {f"{name}_loss": value / weight for name, value in terms}


# Of Keras's own callbacks, those that may set `stop_training`.
STOPPING = (keras.callbacks.EarlyStopping, keras.callbacks.TerminateOnNaN)


def suspects_of_stop(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """The classes of the callbacks that may have ended a training early: one, where one says that it has."""
    patient = [c for c in callbacks if getattr(c, "stopped_epoch", 0)][:1]
    others = [c for c in callbacks if isinstance(c, STOPPING) or not type(c).__module__.startswith("keras.")]
    return list(dict.fromkeys(type(c).__name__ for c in patient or others))


@dataclasses.dataclass(frozen=True)
class Vote:
    """The wishes of one worker, or of any of them.

    Attributes:
      leave: to save and end, because the process will be taken away.
      save: a checkpoint.
      stop: to end the training here, as a callback asked for.
    """

    leave: bool = False
    save: bool = False
    stop: bool = False

    def tensor(self, news: Sequence[float] = ()) -> tf.Tensor:
        """Float32 [3 + len(news)], to be summed over the replicas: the votes, then what else the workers tell."""
        return tf.constant([float(self.leave), float(self.save), float(self.stop), *news])

    @classmethod
    def from_sums(cls, sums: Sequence[float]) -> Vote:
        """Builds the vote of any worker out of the sums."""
        return cls(*(bool(number > 0) for number in sums[:NUM_VOTES]))


NUM_VOTES = len(dataclasses.fields(Vote))
Votes = Callable[[], Vote]  # `Vote` itself continues to the end
