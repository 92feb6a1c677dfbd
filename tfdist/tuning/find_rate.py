"""The range test of learning rates (Smith, "Cyclical Learning Rates", 2017): `--mode=find_rate`.

A short training with a rate that grows from step to step, apart from the run, whose directory gets what was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from keras import ops

from tfdist.errors import DivergedError, UserError
from tfdist.settings.checks import POSITIVE, whole_number
from tfdist.settings.declaration import Settings, setting
from tfdist.storage import files
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.recovery.weights import list_checkpoint_dirs
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings
from tfdist.training.step.optimizer import check_optimizer_builder, parts

SMOOTHING = 0.9
TOO_HIGH = 4.0  # times the lowest loss: the test ends there


@dataclasses.dataclass(frozen=True, kw_only=True)
class FindRateSettings(Settings):
    """A range test of the training's learning rate."""

    NAME: ClassVar[str] = "find_rate"

    lowest: float = setting("rate of the first step", POSITIVE, 1e-6)
    highest: float = setting("rate of the last step, unless the loss rises before", POSITIVE, 1.0)
    steps: int = setting("each with a rate of its own", whole_number(10), 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lowest >= self.highest:
            raise UserError(
                f"find_rate.lowest = {self.lowest} is not below find_rate.highest = {self.highest}. Write 1e-6 and 1.0."
            )

    def rate(self, step: Any) -> Any:
        """Returns the rate of a step, counted from 0."""
        return self.lowest * (self.highest / self.lowest) ** (step / (self.steps - 1))


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """The result of a range test.

    Attributes:
      rates: of the steps.
      losses: of their batches.
      smooth: the losses, averaged with those before.
      suggestion: the rate at which the smooth loss falls fastest; None where it never falls.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smooth: Sequence[float]
    suggestion: float | None


def find_rate(
    settings: FindRateSettings,
    training: TrainSettings,
    request: Request,
    train: Callable[[TrainSettings, Request], object],
    notify: Callable[[str], None],
) -> RangeTest:
    """Trains a few steps, and writes find_rate.json into the run directory.

    The weights are those of the run's newest checkpoint, if it has one, else new ones.

    Args:
      settings: of the test.
      training: of which the rate is wanted.
      request: of the run.
      train: `experiment.train`.
      notify: prints a line.

    Raises:
      UserError: the training is wrong, or its optimizer is the model's own.
    """
    if training.optimizer is None:
        raise UserError("--mode=find_rate changes train.optimizer, which has no value. Name it in the gin file.")
    recorder, directory = _LossRecorder(), RunDirectory(request.run_dir)
    scratch = files.join(directory.path, "find_rate")
    training.strategy.check_alone()
    training.strategy.connect()
    has_weights = training.start_from is None and training.strategy.read_on_chief(
        lambda: any(map(files.is_dir, list_checkpoint_dirs(directory.path)[:1])),
        "The run's checkpoints cannot be read",
    )
    short = dataclasses.replace(
        training,
        optimizer=_raise_rates(training.optimizer, settings),
        steps=settings.steps,
        steps_per_epoch=1,  # so that the logs of a step have its own loss, and not a mean with those before
        epochs=None,
        eval_data=None,
        callbacks=[recorder],
        checkpoint="off",
        recovery="off",
        stop_after_epochs=None,
        log_every_steps=None,
        must_report=None,
        start_from=directory.path if has_weights else training.start_from,
    )
    with contextlib.suppress(DivergedError):  # the last rates were too high
        train(short, Request(run_dir=scratch, keeps=False, begins_empty=True, console=lambda is_chief: Console()))
    result = range_test(settings, recorder.losses)
    if training.strategy.topology.is_chief:
        files.remove_tree(scratch)
        _show(result, notify)
        files.write_atomic(
            files.join(directory.path, "find_rate.json"), to_json(dataclasses.asdict(result), indent=2) + "\n"
        )
    return result


def range_test(settings: FindRateSettings, losses: Sequence[float]) -> RangeTest:
    """Finds where the loss falls fastest, over the logarithm of the rate."""
    rates = [float(settings.rate(step)) for step in range(len(losses))]
    averages = itertools.accumulate(losses, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss, initial=0.0)
    smooth = [mean / (1 - SMOOTHING**count) for count, mean in enumerate(averages) if count]
    suggestion = None
    if len(smooth) > 2:
        slopes = np.gradient(np.array(smooth), np.log(rates))
        until = int(np.argmin(smooth)) + 1
        steepest = int(np.argmin(slopes[:until]))
        suggestion = rates[steepest] if slopes[steepest] < 0 else None
    return RangeTest(rates, list(losses), smooth, suggestion)


class _LossRecorder(keras.callbacks.Callback):
    """Keeps the loss of each step, and ends the training where it has risen."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = float((logs or {}).get("loss", math.nan))
        if not math.isfinite(loss) or (self.losses and loss > TOO_HIGH * min(self.losses) and len(self.losses) > 10):
            self.model.stop_training = True
        if math.isfinite(loss):
            self.losses.append(loss)


class _Rising(keras.optimizers.schedules.LearningRateSchedule):
    """The test's rates by step."""

    def __init__(self, settings: FindRateSettings) -> None:
        super().__init__()
        self._settings = settings

    def __call__(self, step: Any) -> Any:
        return self._settings.rate(ops.cast(step, "float32"))


def _raise_rates(builder: Any, settings: FindRateSettings) -> Callable[[], keras.optimizers.Optimizer]:
    """Builds the optimizer with the test's rates in the place of its own, which groups of variables multiply."""
    check_optimizer_builder(builder)

    def build() -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.get(builder) if isinstance(builder, str) else builder()
        for one in parts(optimizer):
            one._learning_rate = _Rising(settings)  # Keras's setter would ask a schedule of its own for a rate
        return optimizer

    return build


def _show(result: RangeTest, notify: Callable[[str], None]) -> None:
    if not result.losses:
        notify("The loss of the first step is not finite: no rate can be found. Look at the data.")
        return
    notify(f"loss at {len(result.rates)} rates from {result.rates[0]:.2g} to {result.rates[-1]:.2g}, a step each")
    if result.suggestion is None:
        notify("The loss falls at none of these rates. Write a higher find_rate.highest, or look at the model.")
    else:
        notify(f"it falls fastest at {result.suggestion:.2g}; a schedule may begin there")
