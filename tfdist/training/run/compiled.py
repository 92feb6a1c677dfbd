"""A compiled model: what a training takes from it, and what callbacks find while one of their hooks runs.

Optimizer, loss and metrics come from the model where the configuration names none. Invariant: the model comes out
uncompiled until the training's patches end, and is built once. While a hook runs, the model is compiled and computes on
this process alone, so that nothing of that gets into what is traced for the training. The private names of Keras that
say how a model is compiled are used here alone; tests/keras_fit/test_behaviors.py and tests/keras_fit/test_fit.py fail
when they change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import keras

from tfdist.errors import UserError
from tfdist.keras_patches.patches import COMPILED, Patches
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.keras_names import call_symbolically, outputs_by_name, resolve_metric
from tfdist.tasks.supervised import ONLY_OUTPUT, Supervised, Unweighted, Weighted
from tfdist.tasks.task import STEPS, OwnSteps, Task, overrides, symbolic_outputs
from tfdist.training.loop.learner import ModelBuilder, OptimizerBuilder, symbols_of
from tfdist.training.step.state import Learner


def parts_of(
    strategy: Strategy | None,
    model: ModelBuilder,
    optimizer: OptimizerBuilder | None,
    task: Task | None,
    structure: Any,
    patches: Patches | None = None,
) -> tuple[ModelBuilder, OptimizerBuilder, Task]:
    """Model, optimizer and task; what is None is that which the model was compiled with.

    Args:
      strategy: connected; None builds outside of any, for a check.
      model: builds the model; called here only if something is missing.
      optimizer: of the configuration.
      task: of the configuration.
      structure: nest of `tf.TensorSpec`s of a batch of examples.
      patches: compile the model again when they end; without, it stays uncompiled.

    Raises:
      UserError: something is missing, and the model is not compiled.
    """
    if optimizer is not None and task is not None:
        return model, optimizer, task
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        made, own_optimizer, own_task = _build(model, structure, patches, is_task_wanted=task is None)
    return lambda: made, optimizer or (lambda: own_optimizer), cast(Task, task or own_task)


def _build(
    model: ModelBuilder, structure: Any, patches: Patches | None, *, is_task_wanted: bool
) -> tuple[keras.Model, keras.optimizers.Optimizer, Task | None]:
    built = model()
    if not isinstance(built, keras.Model):
        raise UserError(f"The model builder returned {type(built).__name__}; return a keras.Model.")
    if not built.compiled:
        raise UserError(
            "train.optimizer and train.task say how the model learns, and one of them has no value. Write them in a "
            "gin file, such as train.optimizer = @keras.optimizers.Adam and train.task = @supervised.Supervised(). Or "
            "compile the model: then its optimizer, loss and metrics are taken."
        )
    if is_task_wanted and uses_own_steps(built):
        return built, built.optimizer, OwnSteps()
    if patches is not None:
        patches.restore_at_end(built, *COMPILED)
    optimizer = built.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # which compile() puts around one in float16
        optimizer = optimizer.inner_optimizer
    task = _build_task(built, structure) if is_task_wanted else None
    built.compiled, built.optimizer = False, None
    built._compile_loss = built._compile_metrics = built._loss_tracker = None
    return built, optimizer, task


def uses_own_steps(model: keras.Model) -> bool:
    """Whether a compiled model says by itself how it is trained, or was given no loss, which its layers may add.

    So does one with metrics beside those of `compile`, which it or its layers update.
    """
    if model._compile_loss is None or any(overrides(model, method) for method in STEPS):
        return True
    compiled = (model._loss_tracker, model._compile_metrics, *model._compile_loss.metrics)
    return any(all(each is not one for one in compiled) for each in model.metrics)


def find_loss_weights(model: keras.Model) -> Any:
    """The weights of several losses that a model was compiled with; None without any."""
    return model._compile_config.config.get("loss_weights")


def _build_task(model: keras.Model, structure: Any) -> Supervised:
    if not isinstance(structure, tuple | list) or len(structure) < 2:
        raise UserError(
            "The model is compiled to learn from (x, y), and the data gives no y. Give y, or write train.task."
        )
    inputs = symbols_of(structure[0])
    if not model.built:
        model(inputs)
    given = model._compile_config.config
    loss = keras.tree.map_structure(lambda one: one if isinstance(one, str) else keras.losses.get(one), given["loss"])
    weights = find_loss_weights(model)
    own = [(Unweighted, given["metrics"]), (Weighted, given["weighted_metrics"])]
    outputs = _find_outputs(model, inputs)
    if not isinstance(outputs, Mapping):
        (loss, *_), (weight, *_) = keras.tree.flatten(loss), keras.tree.flatten(weights)
        metrics = [kind(one) for kind, some in own for one in _build_metrics(keras.tree.flatten(some))]
        return Supervised(loss=loss, loss_weights=None if weight is None else {ONLY_OUTPUT: weight}, metrics=metrics)
    losses = _by_output(loss, outputs, "loss", every=True)
    weights = _by_output(weights, outputs, "loss_weights")
    by_output: dict[str, list[Any]] = {name: [] for name in losses}
    names = getattr(model, "output_names", None) or []  # Keras takes lists of metrics by them
    for kind, metrics in own:
        for name, some in _by_output(metrics, names if set(names) == set(outputs) else outputs, "metrics").items():
            by_output.setdefault(name, []).extend(map(kind, _build_metrics(keras.tree.flatten(some))))
    by_output = {name: some for name, some in by_output.items() if some or name in losses}
    unreduced = [name for name, one in losses.items() if getattr(one, "reduction", "mean") in ("none", None)]
    if unreduced and len(losses) > 1:
        raise UserError(
            f"The loss of the output {unreduced[0]!r} has reduction='none' beside losses of other outputs, which fit "
            "adds to each of its values. Write reduction='sum'."
        )
    return Supervised(
        loss=dict.fromkeys(outputs) | losses,
        loss_weights={name: one for name, one in weights.items() if name in losses or name not in outputs},
        metrics=by_output,
    )


def _find_outputs(model: keras.Model, inputs: Any) -> Any:
    """The symbolic tensor of the only output, or several by name."""
    outputs = call_symbolically(model, inputs)
    if len(flat := keras.tree.flatten(outputs)) == 1:
        return flat[0]
    if isinstance(outputs, Mapping):  # in the order in which Keras takes lists of losses
        return outputs if isinstance(outputs, OrderedDict) else dict(sorted(outputs.items()))
    names = getattr(model, "output_names", None)
    if names is None:
        raise UserError(
            f"{type(model).__name__}.call returns {len(flat)} outputs without names. Return a dict by output name, and "
            "give compile() losses and metrics by the same names."
        )
    return outputs_by_name(names, outputs)


def _by_output(given: Any, outputs: Collection[str], what: str, *, every: bool = False) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {name: one for name, one in given.items() if one is not None}
    if isinstance(given, list | tuple) and len(given) == len(outputs):
        return {name: one for name, one in zip(outputs, given, strict=True) if one is not None}
    if every and not isinstance(given, list | tuple):
        return dict.fromkeys(outputs, given)
    names = ", ".join(outputs)
    raise UserError(f"compile() was given {what} = {given!r} for the outputs {names}; give a dict by output name.")


def _build_metrics(given: Sequence[Any]) -> list[Any]:
    """Builders of metrics like those that compile() was given; names stay names."""
    return [one if isinstance(one, str) else functools.partial(_build_metric, one) for one in given if one is not None]


def _build_metric(given: Any) -> keras.metrics.Metric:
    """Builds a metric like a given one, of its configuration, or also of attributes named as its class's arguments."""
    if not isinstance(given, keras.metrics.Metric):
        return resolve_metric(given)
    if type(given) is keras.metrics.MeanMetricWrapper:  # whose configuration knows a function by name alone
        return keras.metrics.MeanMetricWrapper(given._fn, given.name, given.dtype, **given._fn_kwargs)
    kind, own = type(given), {n: v for n, v in vars(given).items() if not isinstance(v, keras.metrics.Metric)}
    parameters = inspect.signature(kind).parameters
    is_open = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    config = {n: v for n, v in given.get_config().items() if is_open or n in parameters}  # many do not take `dtype`
    missing = [name for name in parameters if name not in config]
    stored = {name: own[key] for name in missing for key in (f"_{name}", name) if key in own}
    for arguments in (config, config | stored):
        with contextlib.suppress(TypeError):
            made = kind.from_config(arguments)
            if isinstance(made, keras.metrics.MeanMetricWrapper):
                made._fn_kwargs = given._fn_kwargs  # which some of Keras's configurations leave out
            found = _describe(made)
            if not missing or all(found.get(name, value) == value for name, value in _describe(given).items()):
                return made
    raise UserError(
        f"The metric {given.name!r} cannot be built again for the training: {kind.__name__}.get_config leaves out "
        f"{', '.join(missing)}. Return super().get_config() | {{'argument': value, …}} there."
    )


def _describe(value: Any) -> Any:
    """A metric's attributes, or another value, for a comparison: functions by their code, objects by their type."""
    if isinstance(value, keras.metrics.Metric):
        compared = vars(value).keys() - {"name", "_built", "_variables"}
        return {name: keras.tree.map_structure(_describe, vars(value)[name]) for name in compared}
    is_plain = type(value).__module__ in ("builtins", "numpy") and not hasattr(value, "__code__")
    return repr(value) if is_plain else getattr(value, "__code__", type(value))


class CallbackModel:
    """A model compiled with what a training uses, so that a callback's `self.model` has what `fit` gives it.

    Its `loss`, `metrics`, `evaluate` and `predict` are there. The metrics are made for this, and hold nothing of the
    training. What a callback computes is computed by every process that the callback runs in, on all that it is given.
    For a task of the user's own, and a subclassed model of several outputs, the optimizer alone is there.

    Args:
      learner: of the training.
      task: bound to its model.
    """

    def __init__(self, learner: Learner, task: Task) -> None:
        self._model = learner.model
        self._compiled: dict[str, Any] = {"_distribute_strategy": None}
        if isinstance(task, OwnSteps):  # which leave the model compiled
            return
        with Patches() as patches:
            patches.restore_at_end(self._model, *COMPILED)
            _compile(learner, task)
            self._compiled = _compiled_state(self._model)

    @contextlib.contextmanager
    def compiled_for_hooks(self) -> Iterator[None]:
        """A context in which the model is compiled, for the time that a hook runs."""
        with Patches() as patches:
            patches.restore_at_end(self._model, *COMPILED)
            patches.replace(self._model, **self._compiled)  # Keras's own setting would track metrics once more
            try:
                yield
            finally:
                self._compiled = _compiled_state(self._model)  # with the functions that `evaluate` has traced


def _compiled_state(model: keras.Model) -> dict[str, Any]:
    return {name: vars(model)[name] for name in COMPILED if name in vars(model)}


def _compile(learner: Learner, task: Task) -> None:
    model = learner.model
    metrics = [spec.build() for spec in task.metric_specs()]
    for metric, trained in zip(metrics, learner.train_metrics.metrics, strict=True):
        metric.name = trained.name  # Keras numbers those of one class
    arguments, outputs = task.compile_arguments(metrics), symbolic_outputs(model)
    if arguments is None or (isinstance(arguments["loss"], Mapping) and outputs is None):
        model.optimizer = learner.optimizer  # where callbacks look for the learning rate
    else:
        given = model.loss
        # Not the model's own, which may take other arguments.
        keras.Model.compile(model, learner.optimizer, auto_scale_loss=False, jit_compile=False, **arguments)
        model.loss = model.loss if given is None else given  # as a user who compiled it wrote it
        like_outputs = 0.0 if outputs is None else keras.tree.map_structure(lambda _: 0.0, outputs)
        model._compile_metrics.build(like_outputs, like_outputs)  # for `model.metrics` to list them, as in `fit`
    model._distribute_strategy = None
