"""`fit` for compiled Keras models: `keras.Model.fit`, called and answering alike, with tfdist's loop as its engine.

Invariant: what it is given means what it means in `keras.Model.fit`, or is refused in one message; the model comes out
as `fit` leaves it: trained, compiled, with its optimizer where the training left it. Users' own scripts call it, and
KerasTuner through `TfdistFit`; `tfdist.fit` is its name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import experiment
from tfdist.error_ids import format_error
from tfdist.errors import EXIT_INTERRUPTED, NotSavedError, PreemptedError, UserError, build_user_error, suggest
from tfdist.keras_fit import examples
from tfdist.keras_fit.compiled_model import (
    build_compiled,
    check_compiled,
    identity_of,
    precision_of,
    remember_optimizer_config,
    restored_after_training,
    scope_of,
    warn_of_counting_schedules,
)
from tfdist.keras_fit.consoles import console_for, flatten_callbacks
from tfdist.keras_fit.python_batches import BatchError
from tfdist.keras_patches.patches import Patches
from tfdist.settings.checks import COUNT, MOST_SEED, whole_number
from tfdist.storage import files
from tfdist.storage.troubles import explain_failure
from tfdist.strategies.auto import choose_strategy, wrap_strategy
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.losses import check_one_class
from tfdist.tasks.task import overrides
from tfdist.telemetry.console.console import Console, write_line
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.boundaries import EPOCHS
from tfdist.training.loop.callbacks import CallbackError, find_backup
from tfdist.training.run.compiled import uses_own_steps
from tfdist.training.run.eval_sets import SET_NAME, EvalSet
from tfdist.training.run.request import Request
from tfdist.training.run.run import reporting_failures
from tfdist.training.run.train_settings import TrainSettings
from tfdist.user_code import where_defined


class FitError(UserError, ValueError):
    """An error in a call of `fit`; a ValueError, as `keras.Model.fit` raises it."""


def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
    *,
    run_dir: str | None = None,
    strategy: Strategy | str | None = "auto",
    seed: int | None = None,
    **settings: Any,
) -> keras.callbacks.History:
    """Trains a compiled model; the arguments up to `validation_freq` are those of `keras.Model.fit`.

    Args:
      model: compiled, made in the strategy's scope or in none.
      x: arrays, a batched `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator, or one of tfdist's sources.
      y: targets, where x holds none.
      batch_size: examples of a step over all replicas; None is 32, or what x comes in.
      epochs: the number of the last epoch.
      verbose: 0 tells warnings only, 2 a line an epoch, 1 and "auto" all that a run tells.
      callbacks: one, several in any nest, or a CallbackList. A BackupAndRestore among them says where the run is saved.
      validation_split: the share at the end of the arrays that is evaluated on and not trained.
      validation_data: what `x` takes, or a tuple (x, y) or (x, y, sample_weight) of arrays; or several by name.
      shuffle: trains arrays and a PyDataset's batches in another order each epoch.
      class_weight: a weight for the examples of each class.
      sample_weight: a weight for each example.
      initial_epoch: epochs that the model was trained for before.
      steps_per_epoch: updates that count as an epoch.
      validation_steps: batches of an evaluation.
      validation_batch_size: None takes batch_size.
      validation_freq: evaluates after every so many epochs, or after those listed, counted from 1.
      run_dir: where the run is kept. One that was killed resumes from there, and so does one with more `epochs` than
        before; one that has them all gives the model and the history that it ended with. None keeps nothing: every call
        trains on from where model and optimizer stand.
      strategy: who computes; "auto" is that in whose scope the model was made, or what `choose_strategy` gives.
      seed: of the order of the examples; None draws one from Python's `random`, and is 0 with a run_dir.
      settings: others of `train` in a gin file: deterministic, num_microbatches, checkpoint, xla …

    Returns:
      The history, by epoch, as `keras.Model.fit` gives it.

    Raises:
      FitError: something given is wrong; a ValueError.
      DivergedError: the loss or a gradient was not finite.
      KeyboardInterrupt: of Ctrl-C; with a run_dir the run is saved before. SystemExit: the same of SIGTERM, and of both
        with status 5 where it could not be saved.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("model", "settings")} | settings
    if numbers := {name: value.item() for name, value in arguments.items() if isinstance(value, np.generic)}:
        return fit(model, **arguments | numbers)
    with _raising_as_fit(), contextlib.ExitStack() as at_end:
        check_compiled(model)
        if overrides(model, "fit") and model is not getattr(_thread, "prepared", None):
            return _call_own_fit(model, arguments)
        strategy = _choose_and_connect(model, strategy)
        at_end.enter_context(reporting_failures(strategy))
        if isinstance(validation_freq, Collection) and not isinstance(validation_freq, str):
            validation_freq = sorted(np.array(list(validation_freq)).tolist())
        _check_arguments(settings, epochs, initial_epoch, validation_freq, run_dir)
        epochs = _cap_count(epochs, keras.config.max_epochs())
        given, shows = flatten_callbacks(callbacks)
        history = next((each for each in given if isinstance(each, keras.callbacks.History)), keras.callbacks.History())
        tuner_dir, values = find_trial(given)
        kept = run_dir or tuner_dir
        resumes = kept is not None or find_backup(given) is not None
        seed = _draw_seed(strategy, resumes, at_end) if seed is None else seed
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = examples.split((x, y, sample_weight), validation_split)
        data = examples.to_train(
            x,
            y,
            sample_weight,
            class_weight=class_weight,
            batch_size=batch_size,
            steps_per_epoch=_cap_count(steps_per_epoch, keras.config.max_steps_per_epoch()),
            seed=seed if shuffle else None,
            epochs=range(initial_epoch, epochs),
        )
        at_end.callback(data.close)
        assert data.source is not None and data.batch_size is not None
        if class_weight is not None:
            check_one_class(model.loss, data.source.structure[1])
        sets, sources = {}, {"data": data.source}
        for name, each in (validation_data if isinstance(validation_data, Mapping) else {"": validation_data}).items():
            if isinstance(validation_data, Mapping):
                SET_NAME("The name of a set of validation_data", name)
            holdout = examples.to_evaluate(each, batch_size=validation_batch_size or batch_size, steps=validation_steps)
            at_end.callback(holdout.close)
            if holdout.source is not None:
                sets[name] = EvalSet(functools.partial(lambda source: source, holdout.source), holdout.batch_size)
                sources[f"validation_data {name}".rstrip()] = holdout.source
        if not (resumes or initial_epoch) and strategy.topology.is_chief:
            warn_of_counting_schedules(model)
        model.history = history
        parts = {"batch_size": data.batch_size, "steps_per_epoch": data.steps_per_epoch, "shuffle": bool(shuffle)}
        known_by = values | {f"fit.{name}": repr(value) for name, value in (parts | {"seed": seed}).items()}
        known_by |= identity_of(model, sources) if resumes else {}
        defaults = {"precision": precision_of(model), "recovery": "off"}  # Keras's fit has no recovery
        defaults |= {} if resumes else {"checkpoint": "off"}
        trained = TrainSettings(
            model=lambda: model,
            train_data=lambda: data.source,
            eval_data=sets.get("", sets or None),
            strategy=strategy,
            global_batch_size=data.batch_size,
            epochs=epochs,
            steps_per_epoch=data.steps_per_epoch,
            eval_every=validation_freq,
            shuffle=bool(shuffle),
            seed=seed,
            callbacks=given if history in given else [*given, history],
            **(defaults | settings),
        )
        _train(model, trained, kept, known_by, console_for(verbose if shows else 0), initial_epoch)
        if not uses_own_steps(model):
            with contextlib.suppress(KeyError):  # of a metric whose output has no targets, as from `evaluate`
                build_compiled(model, data.source.structure)
        remember_optimizer_config(model, known_by)
    return history


_thread = threading.local()


def _call_own_fit(model: keras.Model, arguments: Mapping[str, Any]) -> keras.callbacks.History:
    """Calls a class's own `fit`, such as KerasHub's, which prepares the data; it finds this engine in Keras's `fit`.

    Raises:
      UserError: it does not call Keras's `fit` with its model.
    """
    parameters = inspect.signature(keras.Model.fit).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    for_keras = {n: value for n, value in arguments.items() if n in defaults and value is not defaults[n]}
    ours = {name: value for name, value in arguments.items() if name not in defaults}
    histories = []

    def train(prepared: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        if prepared is not model:
            raise UserError(f"The fit of {type(model).__name__} trains a {type(prepared).__name__}. Call model.fit.")
        _thread.prepared = model
        try:
            histories.append(fit(prepared, *args, **kwargs | ours))
        finally:
            _thread.prepared = None
        return histories[-1]

    with Patches() as patches:
        patches.replace(keras.Model, fit=train)
        returned = type(model).fit(model, **for_keras)
    if not histories:
        raise UserError(
            f"{type(model).__name__} has a fit of its own{where_defined(type(model).fit)}, which does not call that of "
            "keras.Model. Call model.fit; or write its loop as a train_step."
        )
    return returned if isinstance(returned, keras.callbacks.History) else histories[-1]


def _train(
    model: keras.Model,
    settings: TrainSettings,
    run_dir: str | None,
    known_by: Mapping[str, str],
    console: Callable[[bool], Console],
    initial_epoch: int,
) -> None:
    """Trains in `run_dir`, or where nothing stays; `known_by` are the settings that a run directory is known by."""
    with contextlib.ExitStack() as leaving:
        request = Request(
            run_dir=run_dir or leaving.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-fit-")),
            settings=lambda: known_by,
            console=console,
            keeps=run_dir is not None,
            initial_epoch=initial_epoch,
            repeats_end=True,
            seeds=False,
        )
        leaving.enter_context(restored_after_training(model, settings.strategy))
        experiment.train(settings, request)


class TfdistFit:
    """Lets KerasTuner's tuners train by tfdist: `class Mine(TfdistFit, keras_tuner.HyperModel)`, with `build` alone."""

    def fit(self, hp: Any, model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains a built model as `keras_tuner.HyperModel.fit` does."""
        return fit(model, *args, **kwargs)


# Settings that the call makes itself, or (sharding) whose optimizer would not be the model's own.
OMITTED = ("model", "train_data", "eval_data", "optimizer", "task", "hyperparameters", "steps", "callbacks", "sharding")
# What fit calls some of the others.
NAMES = {"global_batch_size": "batch_size", "eval_every": "validation_freq", "eval_batch_size": "validation_batch_size"}


@contextlib.contextmanager
def _raising_as_fit() -> Iterator[None]:
    """Raises a training's errors as Keras's fit: those of a callback or the data, ValueError, KeyboardInterrupt."""
    try:
        yield
    except CallbackError as error:
        raise (error.__cause__ or error) from None
    except BatchError as error:
        raise error.raised from None
    except UserError as error:
        raise FitError(_rephrase_for_fit(format_error(error))) from error
    except OSError as error:
        if (cause := explain_failure(error)) is None:
            raise
        raise FitError(str(cause)) from error
    except NotSavedError as error:
        write_line(sys.stderr, format_error(error), "error")
        raise SystemExit(error.exit_status) from error
    except PreemptedError as error:
        if error.exit_status == EXIT_INTERRUPTED:
            raise KeyboardInterrupt(str(error)) from error
        raise SystemExit(error.exit_status) from error


def _rephrase_for_fit(message: str) -> str:
    """A message about a setting of an experiment, about the argument that it is here."""
    message = message.replace(", or write train.task.", ".")  # which fit does not take
    message = re.sub(r", or as a task, and name it as train\.task:(.|\n)*", ", or train by model.fit.", message)
    for name, here in (("train.eval_data", "validation_data"), ("train.train_data", "x"), ("--run_dir", "run_dir")):
        message = message.replace(name, here)
    return re.sub(r"\b(?:train|fit)\.([a-z_]+)", r"\1", message)


def _check_arguments(settings: Mapping[str, Any], epochs: Any, initial_epoch: Any, freq: Any, run_dir: Any) -> None:
    known = [name for name in TrainSettings.declarations() if name not in (*OMITTED, *NAMES)]
    for name in settings:
        if name not in known:
            raise build_user_error(
                f"fit() got an argument {name!r}, which neither keras.Model.fit nor tfdist.fit takes."
                f"{suggest(NAMES.get(name, name), [*inspect.signature(fit).parameters, *known])}",
                error_id="unknown-setting",
            )
    COUNT("fit.epochs", epochs)
    whole_number(0)("fit.initial_epoch", initial_epoch)
    EPOCHS("fit.validation_freq", freq)
    if not isinstance(run_dir, str | os.PathLike | None):
        raise UserError(f"run_dir is {run_dir!r}; write a path, such as 'runs/one', or None.")


def _choose_and_connect(model: keras.Model, strategy: Strategy | str | None) -> Strategy:
    """Connects `strategy`, or else that of the model's or the current scope, or a chosen one; returns it."""
    made_in = scope_of(model)
    if strategy in (None, "auto"):
        scope = tf.distribute.get_strategy() if made_in is None and tf.distribute.has_strategy() else made_in
        strategy = choose_strategy() if scope is None else wrap_strategy(scope)
    if not isinstance(strategy, Strategy):
        raise UserError(f"strategy is 'auto', or one of tfdist such as tfdist.Mirrored(); received {strategy!r}.")
    strategy.check_alone()
    strategy.connect()
    if made_in not in (None, strategy.distribution):
        raise UserError(
            f"The model was not made in the scope of the strategy {strategy.name}. Write: with strategy.scope(): model "
            "= …; model.compile(…)"
        )
    return strategy


def _draw_seed(strategy: Strategy, resumes: bool, at_end: contextlib.ExitStack) -> int:
    """0 for a run that may continue in another process; else drawn, and on every worker what the chief drew.

    The generator moves on only `at_end`: a model that the call builds draws the seeds of its weights as in fit.
    """
    if resumes:
        return 0
    state, drawn = random.getstate(), random.randint(0, MOST_SEED)
    random.setstate(state)
    at_end.callback(random.randint, 0, MOST_SEED)
    return int(strategy.from_chief([drawn])[0])


def _cap_count(count: Any, most: int | None) -> Any:
    """A count of epochs or steps, None for all of them, under a cap of `keras.config`."""
    if most is None or not (count is None or isinstance(count, int)):
        return count
    return most if count is None else min(count, most)


def find_trial(callbacks: Sequence[Any]) -> tuple[str | None, dict[str, str]]:
    """Returns KerasTuner's directory of the running trial, one an execution, and its values as settings.

    None and no values where none of the callbacks is KerasTuner's.
    """
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
