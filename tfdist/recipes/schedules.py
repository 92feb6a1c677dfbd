"""Learning-rate schedules whose lengths are counted by the run: `decay_steps = '12 epochs'`, `length = '0.06 of run'`.

Keras's own classes stand here under their names and with their arguments; those that count steps also take any length
of `tfdist.recipes.lengths`. What Keras lacks reads like them. Any may stand wherever Keras takes a schedule.

Invariant: a schedule is a function of the step alone once the run is known, which `bind` tells it; all workers and
every start of a run compute the same numbers.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, TypeAlias

import keras
from keras import ops
from keras.optimizers import schedules as of_keras
from keras.optimizers.schedules import LearningRateSchedule

from tfdist.errors import UserError
from tfdist.recipes.lengths import RunLength, parse_length
from tfdist.settings.checks import COUNT, Check, number, one_of

Rate: TypeAlias = "LearningRateSchedule | float"
PACKAGE = "tfdist"
RATE = Check(
    "a rate, or a schedule such as @schedules.CosineDecay()",
    lambda value: isinstance(value, LearningRateSchedule | int | float) and not isinstance(value, bool),
)


class Schedule(LearningRateSchedule):
    """A schedule that has to know the run. Subclasses give `_value(step)`, float32 scalars both."""

    _run: RunLength | None = None

    def bind(self, run: RunLength) -> None:
        """Binds the schedule, and those inside of it, to the length of a run; again for another run."""
        self._run = run
        for inner in vars(self).values():
            bind(inner, run)
        self._adapt_to_run(run)

    def _adapt_to_run(self, run: RunLength) -> None:
        """Sets what depends on the run: its number of steps, its batch size."""

    def _value(self, step: Any) -> Any:
        raise NotImplementedError

    def __call__(self, step: Any) -> Any:
        if self._run is None:
            raise UserError(
                f"{type(self).__name__} counts its lengths from the run that it is part of, and it is part of none. "
                "Outside of a training of tfdist call its bind() first."
            )
        return self._value(ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        """The arguments, as they were given."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Schedule:
        """Builds a schedule, and those within it."""
        return cls(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})


def bind(schedule: Any, run: RunLength) -> None:
    """Binds a schedule to the length of a run, if it depends on that."""
    if isinstance(schedule, Schedule):
        schedule.bind(run)


def _with_lengths(base: Any, *counted: str) -> Any:
    """Keras's schedule with lengths in the arguments that are `counted`."""
    signature = inspect.signature(base.__init__)

    class Counting(Schedule, base):
        @functools.wraps(base.__init__)  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            given = signature.bind(self, *arguments, **named)
            self._given = {name: value for name, value in given.arguments.items() if name != "self"}
            self._lengths = {  # of a boundary each, or one
                name: keras.tree.map_structure(functools.partial(parse_length, f"{base.__name__}.{name}"), value)
                for name, value in self._given.items()
                if name in counted
            }

        def _adapt_to_run(self, run: RunLength) -> None:
            numbers = keras.tree.map_structure(lambda length: length.steps(run), self._lengths)
            try:
                base.__init__(self, **(self._given | numbers))
            except (ValueError, TypeError) as error:
                raise UserError(f"{base.__name__}: {error}") from error

        def _value(self, step: Any) -> Any:
            return base.__call__(self, step)

        def get_config(self) -> dict[str, Any]:
            return dict(self._given)

    Counting.__name__ = Counting.__qualname__ = base.__name__
    Counting.__doc__ = f"`keras.optimizers.schedules.{base.__name__}`, with lengths for {', '.join(counted)}."
    return keras.saving.register_keras_serializable(PACKAGE)(Counting)


CosineDecay = _with_lengths(of_keras.CosineDecay, "decay_steps", "warmup_steps")
CosineDecayRestarts = _with_lengths(of_keras.CosineDecayRestarts, "first_decay_steps")
ExponentialDecay = _with_lengths(of_keras.ExponentialDecay, "decay_steps")
InverseTimeDecay = _with_lengths(of_keras.InverseTimeDecay, "decay_steps")
PiecewiseConstantDecay = _with_lengths(of_keras.PiecewiseConstantDecay, "boundaries")
PolynomialDecay = _with_lengths(of_keras.PolynomialDecay, "decay_steps")


@keras.saving.register_keras_serializable(PACKAGE)
class Warmup(Schedule):
    """Rises linearly to the first value of another schedule, and goes on with that.

    Args:
      then: the schedule, or a rate that stays.
      length: of the rise.
      start: the factor at step 0.
    """

    def __init__(self, then: Rate, length: str | int = "0.06 of run", start: float = 0.0) -> None:
        RATE("Warmup.then", then)
        number(0, 1)("Warmup.start", start)
        self.then, self.length, self.start = then, length, start
        self._length = parse_length("Warmup.length", length)

    def _adapt_to_run(self, run: RunLength) -> None:
        self._steps = self._length.steps(run)

    def _value(self, step: Any) -> Any:
        done = ops.clip(step / max(self._steps, 1), 0.0, 1.0)
        factor = self.start + (1.0 - self.start) * done
        return factor * _evaluate_rate(self.then, ops.maximum(step - self._steps, 0.0))


@keras.saving.register_keras_serializable(PACKAGE)
class InverseSquareRoot(Schedule):
    """`peak` · √(timescale ÷ max(step, timescale)), as Vaswani et al. (2017) after their warm-up.

    Args:
      peak: the rate until then.
      timescale: the length after which it falls.
    """

    def __init__(self, peak: float, timescale: str | int = "0.06 of run") -> None:
        number(0)("InverseSquareRoot.peak", peak)
        self.peak, self.timescale = peak, timescale
        self._length = parse_length("InverseSquareRoot.timescale", timescale)

    def _adapt_to_run(self, run: RunLength) -> None:
        self._steps = max(self._length.steps(run), 1)

    def _value(self, step: Any) -> Any:
        return self.peak * ops.sqrt(self._steps / ops.maximum(step, float(self._steps)))


@keras.saving.register_keras_serializable(PACKAGE)
class WarmupStableDecay(Schedule):
    """Rises, stays, and falls at the end of the run (Hu et al., "MiniCPM", 2024).

    Args:
      peak: the rate in between.
      warmup: the length of the rise, which is linear.
      decay: the length of the fall, which is linear too and ends with the run.
      end: the last rate ÷ peak.
    """

    def __init__(
        self, peak: float, warmup: str | int = "0.02 of run", decay: str | int = "0.2 of run", end: float = 0.0
    ) -> None:
        number(0)("WarmupStableDecay.peak", peak)
        number(0, 1)("WarmupStableDecay.end", end)
        self.peak, self.warmup, self.decay, self.end = peak, warmup, decay, end
        self._warmup = parse_length("WarmupStableDecay.warmup", warmup)
        self._decay = parse_length("WarmupStableDecay.decay", decay)

    def _adapt_to_run(self, run: RunLength) -> None:
        self._rise, self._fall = self._warmup.steps(run), self._decay.steps(run)
        self._total = run.total_steps
        if self._rise + self._fall > self._total:
            raise UserError(
                f"WarmupStableDecay rises for {self._rise:,} steps and falls for {self._fall:,}, and the run has "
                f"{self._total:,}. Shorten warmup or decay."
            )

    def _value(self, step: Any) -> Any:
        rising = ops.minimum(step / max(self._rise, 1), 1.0) if self._rise else 1.0
        done = ops.clip((step - (self._total - self._fall)) / max(self._fall, 1), 0.0, 1.0)
        return self.peak * rising * (1.0 - (1.0 - self.end) * done)


@keras.saving.register_keras_serializable(PACKAGE)
class ForBatch(Schedule):
    """A rate that was found for another batch size, for the one of this run.

    The global batch stays the same with fewer workers, and so does the rate.

    Args:
      rate: the schedule or the rate for `base_batch_size`.
      base_batch_size: examples in a global batch.
      rule: "linear" (Goyal et al., 2017) or "square root" (as You et al., 2019, use it for LAMB).
    """

    def __init__(self, rate: Rate, base_batch_size: int, rule: str = "linear") -> None:
        RATE("ForBatch.rate", rate)
        COUNT("ForBatch.base_batch_size", base_batch_size)
        one_of("linear", "square root")("ForBatch.rule", rule)
        self.rate, self.base_batch_size, self.rule = rate, base_batch_size, rule

    def _adapt_to_run(self, run: RunLength) -> None:
        times = run.global_batch_size / self.base_batch_size
        self._factor = times if self.rule == "linear" else math.sqrt(times)

    def _value(self, step: Any) -> Any:
        return self._factor * _evaluate_rate(self.rate, step)


def _evaluate_rate(schedule: Rate, step: Any) -> Any:
    return ops.cast(schedule(step), "float32") if callable(schedule) else ops.convert_to_tensor(schedule, "float32")
