"""`fit` for compiled Keras models, called as `keras.Model.fit` is, that trains by tfdist's loop; KerasTuner drives it.

Invariant: what it is given means what it means in `keras.Model.fit`, and what it does not know is refused; the model is
compiled afterwards as it was before. Users' own scripts call it; `tfdist.fit` is its name.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfdist import experiment
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.strategies.one_device import OneDevice
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run import Request

DEFAULT_BATCH_SIZE = 32  # Keras's
COMPILED = ("compiled", "optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")


def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    validation_data: Any = None,
    shuffle: bool = True,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    validation_batch_size: int | None = None,
    run_dir: str | None = None,
    strategy: Strategy | None = None,
    **settings: Any,
) -> keras.callbacks.History:
    """Trains a compiled model.

    Args:
      model: compiled; with a strategy of several replicas it was made inside `strategy.scope()`.
      x: arrays, or what else a `train_data` function may give, with y in it.
      y: targets.
      batch_size: examples of a step, over all replicas.
      epochs: the number of the last epoch.
      verbose: 0 prints nothing.
      callbacks: Keras's. KerasTuner's tell where the trial is kept.
      validation_data: `(x, y)` or `(x, y, sample_weight)`, evaluated on after each epoch.
      shuffle: another order each epoch.
      sample_weight: a weight for each example.
      initial_epoch: epochs that the model was trained for before.
      validation_batch_size: None takes batch_size.
      run_dir: where the run is kept; a run that was killed goes on from there. None: the trial's directory under
        KerasTuner, else one that is removed at the end.
      strategy: who computes; None is one device.
      settings: any other of `train`'s: seed, deterministic, precision, backup …

    Returns:
      The history, by epoch, as `keras.Model.fit` gives it.

    Raises:
      UserError: something given is wrong.
      DivergedError: the loss or a gradient was not finite.
    """
    if not isinstance(model, keras.Model) or not model.compiled:
        raise UserError("tfdist.fit takes a compiled keras.Model: call model.compile(…) before.")
    examples = x if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    given = list(callbacks or ())
    history = keras.callbacks.History()
    with contextlib.ExitStack() as leaving:
        where, values = _trial(given)
        if run_dir is None:
            run_dir = where or leaving.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-fit-"))
        if verbose in (0, "0"):
            leaving.enter_context(contextlib.redirect_stdout(io.StringIO()))
        leaving.enter_context(_compiled_again(model))
        experiment.train(
            request=Request(run_dir=run_dir, settings=lambda: values),
            model=lambda: model,
            train_data=lambda: examples,
            eval_data=None if validation_data is None else lambda: tuple(validation_data),
            strategy=strategy or OneDevice(),
            global_batch_size=batch_size or DEFAULT_BATCH_SIZE,
            eval_batch_size=validation_batch_size,
            epochs=epochs - initial_epoch,
            shuffle=shuffle,
            callbacks=[history, *given],
            **settings,
        )
    return history


class TfdistFit:
    """Lets KerasTuner's tuners train by tfdist: `class Mine(TfdistFit, keras_tuner.HyperModel)`, with `build` alone."""

    def fit(self, hp: Any, model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """What `keras_tuner.HyperModel.fit` does."""
        return fit(model, *args, **kwargs)


@contextlib.contextmanager
def _compiled_again(model: keras.Model) -> Iterator[None]:
    before = {name: getattr(model, name, None) for name in COMPILED}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


def _trial(callbacks: Sequence[Any]) -> tuple[str | None, dict[str, str]]:
    """Where KerasTuner keeps the trial that trains, one directory an execution, and its values as settings."""
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
