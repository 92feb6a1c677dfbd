"""Everything that training changes, made inside a strategy's scope and checked before the first step.

Invariant: a metric of the user's own that is no sum over examples, which replicas add up, is refused: it would report
another value than on one device.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UserError, build_user_error, shorten_list
from tfdist.keras_patches.patches import COMPILED, Patches
from tfdist.keras_patches.random_by_place import FixedShapes, record_fixed_shapes
from tfdist.recipes.recompute import AUTO, choose_layers
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.task import OwnSteps, Task, symbolic_inputs
from tfdist.telemetry import heartbeat
from tfdist.training.sharding.sharded_update import build_on_stages, build_sharded
from tfdist.training.sharding.sharded_weights import gather_weights
from tfdist.training.sharding.shards import HOST, OPTIMIZER, WEIGHTS, LateValues, Shards
from tfdist.training.sharding.stages import compute_in_stages, layers_by_device, map_variable_devices
from tfdist.training.sharding.tensor_parallel import choose_splits, split_layers
from tfdist.training.step.gradients import explain_errors, forward
from tfdist.training.step.layer_state import patch_layers
from tfdist.training.step.metrics import ADDED, MetricGroup, result_of
from tfdist.training.step.optimizer import build_optimizer, list_optimizers, parts
from tfdist.training.step.own_step import StepMetrics, StepTrace, average_over_replicas, trace_step
from tfdist.training.step.precision import LossScale, as_tf_function
from tfdist.training.step.randomness import seed_generators
from tfdist.training.step.state import Learner
from tfdist.training.watch.equality import check_agreement
from tfdist.user_code import where_defined

MOST_ROWS = 32
FLOAT8_NAMES = ("_scale", "_amax_history")  # of variables of Keras's layers
KNOWN_PACKAGES = {"keras", "tfdist"}  # whose metrics are such sums
ADVICE_OF_MODELS = "All workers train one model. Give them the same code and the same settings."
ModelBuilder = Callable[[], keras.Model]
OptimizerBuilder: TypeAlias = "Callable[[], keras.optimizers.Optimizer] | str"


def build_learner(
    strategy: Strategy,
    model: ModelBuilder,
    optimizer: OptimizerBuilder,
    task: Task,
    structure: Any,
    patches: Patches,
    *,
    precision: str,
    batch_size: int,
    sharding: str | Sequence[str] | None = None,
) -> Learner:
    """Makes model, optimizer and metrics; every worker ends with the chief's values.

    Args:
      strategy: connected.
      model: builds the model, uncompiled.
      optimizer: builds the optimizer.
      task: checked against the model on `structure`.
      structure: nest of `tf.TensorSpec`s of a batch of examples.
      patches: of the training.
      precision: "float16" adds a loss scale.
      batch_size: examples in a global batch.
      sharding: as in `Shards`, with patterns of layers' names for the list; None holds everything on every replica.

    Raises:
      UserError: the parts do not fit together.
    """
    heartbeat.beat(heartbeat.BUILDING)
    if isinstance(task, OwnSteps):
        return _build_with_own_steps(strategy, model, structure, patches)
    with strategy.scope():
        make = functools.partial(build_model, model, task, structure, patches)
        built, shards, arrange = _build(strategy, make, sharding, patches)
        check_divisible(built, num_parts=strategy.topology.num_replicas)
        train_metrics = MetricGroup(task.metric_specs())
        eval_metrics = MetricGroup(task.metric_specs(), names=train_metrics.names)
        fixed_shapes = check_fit(built, task, structure, (train_metrics, eval_metrics))
        if shards is None:
            arrange()
            made_optimizer = build_optimizer(optimizer, built, patches, build_on_stages if strategy.stages else None)
        loss_scale = LossScale(batch_size) if precision == "float16" else None
    if shards is not None:
        strategy.synchronize([v for v in built.variables if not shards.is_sharded(v)])
        arrange()
        made_optimizer = build_optimizer(optimizer, built, patches, functools.partial(build_sharded, shards=shards))
    check_agreement(strategy, lambda: describe_model(built, made_optimizer), advice=ADVICE_OF_MODELS)
    scale_factor = float(made_optimizer.loss_scale_factor or 1.0)
    patches.replace(made_optimizer, loss_scale_factor=None)
    patch_layers(built, strategy, patches)
    if shards is None:
        strategy.synchronize([*built.variables, *made_optimizer.variables])
    metrics = (train_metrics, eval_metrics)
    return Learner(built, made_optimizer, loss_scale, *metrics, scale_factor, shards, fixed_shapes=fixed_shapes)


def _build_with_own_steps(strategy: Strategy, builder: ModelBuilder, structure: Any, patches: Patches) -> Learner:
    """Builds the learner of a model whose own steps train and evaluate it; the model stays compiled."""
    with strategy.scope():
        model = builder()
        step = trace_step(model, "train_step", structure)
        updating = [optimizer for optimizer, _ in step.updates]
        optimizers = [*updating, *(inner for each in updating for inner in list_optimizers(each))]
        _check_own_step(model, step, optimizers, strategy.topology.num_replicas)
        for optimizer, variables in step.updates:
            if not optimizer.built:
                optimizer.build(variables)
        metrics = StepMetrics(model, step)
    check_divisible(model, num_parts=strategy.topology.num_replicas, own_step=True)
    compiled = model.optimizer
    is_used = compiled is not None and any(each in updating for each in [compiled, *parts(compiled)])
    main = compiled if is_used else updating[0]
    names = {id(value): name for name, value in vars(model).items() if isinstance(value, keras.optimizers.Optimizer)}
    others = {
        names.get(id(each), f"optimizer_{i}"): each
        for i, each in enumerate(updating)
        if each is not main and each not in parts(main)
    }
    check_agreement(strategy, lambda: describe_model(model, main), advice=ADVICE_OF_MODELS)
    average_over_replicas(model, optimizers, metrics.metrics, patches)
    patch_layers(model, strategy, patches)
    slots = [variable for each in (main, *others.values()) for variable in each.variables]
    strategy.synchronize([*model.variables, *slots])
    return Learner(model, main, None, metrics, metrics, other_optimizers=others)


def _check_own_step(
    model: keras.Model, step: StepTrace, optimizers: Sequence[keras.optimizers.Optimizer], num_replicas: int
) -> None:
    """Raises UserError where a model's own step updates nothing, or by what does not fit a step on replicas."""
    name = f"{type(model).__name__}.train_step"
    if step.adds_rows and num_replicas > 1:
        raise UserError(
            f"{name} differentiates a loss of each row, and so adds up their gradients. On {num_replicas} replicas "
            "tfdist averages them. Take the mean of the loss: keras.ops.mean(loss)."
        )
    if not optimizers:
        raise UserError(f"{name} applies no gradients to an optimizer: nothing would be learned.")
    for each in optimizers:
        if each.gradient_accumulation_steps:
            raise UserError(
                f"{type(each).__name__}.gradient_accumulation_steps is {each.gradient_accumulation_steps!r}; a step "
                "updates once. Leave it out, and take larger batches."
            )
        if each.use_ema and each.ema_overwrite_frequency and num_replicas > 1:
            raise UserError(
                f"{type(each).__name__}.ema_overwrite_frequency is {each.ema_overwrite_frequency!r}, and {name} is "
                f"computed on {num_replicas} replicas, where Keras cannot overwrite weights within a step. Leave it "
                "out: at the end of the training the averages take the weights' place."
            )


def _build(
    strategy: Strategy, build: Callable[[], keras.Model], sharding: str | Sequence[str] | None, patches: Patches
) -> tuple[keras.Model, Shards | None, Callable[[], None]]:
    """The model, the owners of its variables, and what has variables and layers lie and compute where they belong.

    Variables that lie nowhere as a whole have no values before that.
    """
    if sharding is None and not strategy.stages:
        return build(), None, lambda: None
    if sharding in (OPTIMIZER, HOST):
        built = build()
        shards = Shards(strategy, built.trainable_variables, sharding)
        return built, shards, shards.shard_variables
    with LateValues() as values:
        built = build()
    if strategy.stages:
        layer_devices = layers_by_device(built, strategy.stages, strategy.devices)
        devices = map_variable_devices(layer_devices)
        values.assign(device=lambda variable: devices.get(id(variable)))
        return built, None, functools.partial(compute_in_stages, layer_devices, patches)
    assert sharding is not None
    splits = [] if isinstance(sharding, str) else choose_splits(built, sharding, strategy.topology.num_replicas)
    blocks = choose_layers(built, AUTO) if sharding == WEIGHTS else []
    axes = {id(each.variable): each.axis for each in splits}
    shards = Shards(strategy, built.trainable_variables, sharding, blocks, axes)
    values.assign(but=shards.is_sharded)

    def arrange() -> None:
        shards.shard_variables()
        gather_weights(shards.blocks, shards, patches)
        split_layers(splits, strategy, shards, patches)

    return built, shards, arrange


def build_model(builder: ModelBuilder, task: Task, structure: Any, patches: Patches | None = None) -> keras.Model:
    """A built model that takes what the task gives it, and that the task is bound to. Call it inside the scope.

    `patches`: end what the task changes about the model; without, it stays so.

    Raises:
      UserError: the builder gives no uncompiled Keras model, or it does not take the examples.
    """
    if isinstance(builder, keras.Model):
        raise UserError(
            "The model is a Keras model already; its variables must be made inside the strategy's scope. Give a "
            "function that returns it: @my_module.build_model without parentheses."
        )
    model = builder()
    if not isinstance(model, keras.Model):
        raise UserError(
            f"The model builder{where_defined(builder)} returned {type(model).__name__}; return an uncompiled "
            "keras.Model."
        )
    if model.compiled:
        raise UserError(
            f"The model is compiled{where_defined(builder)}. Return it uncompiled: train.optimizer and train.task take "
            "the place of compile()."
        )
    if patches is not None:
        patches.restore_at_end(model, *COMPILED)
    # Keras leaves a Sequential without shapes, and without a word, where a layer does not say what it gives.
    is_open = isinstance(model, keras.Sequential) and not hasattr(model, "outputs")
    with explain_errors(structure):
        if is_open or not model.built:
            model(symbols_of(task.inputs(structure)))
        check_inputs(model, task.inputs(structure))
        task.bind(model, structure)
    if not model.trainable_variables:
        raise UserError("The model has no trainable variables: nothing would be learned.")
    return model


def symbols_of(structure: Any) -> Any:
    """A nest of symbolic tensors like a nest of `tf.TensorSpec`s."""
    return tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), structure)


def check_fit(model: keras.Model, task: Task, structure: Any, metrics: Sequence[MetricGroup]) -> FixedShapes:
    """Checks that model, loss and metrics take the examples.

    Returns:
      The shapes of random numbers that do not depend on the batch.

    Raises:
      UserError: they do not.
    """
    with explain_errors(structure), record_fixed_shapes() as shapes:
        check_inputs(model, task.inputs(structure))
        trace_loss(model, task, structure, metrics)
    return frozenset(shapes)


def check_divisible(model: keras.Model, *, num_parts: int, own_step: bool = False) -> None:
    """Raises UserError where the model cannot train on a batch that is computed in several parts.

    `own_step`: the model's own `train_step` computes them.
    """
    if num_parts == 1:
        return
    kept = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if kept:
        raise UserError(
            f"The layer {kept[0]!r} is stateful: it keeps a state for each row of the batch. The batch is cut into "
            f"{num_parts} parts, for replicas and microbatches, whose rows are not the same. Train it on one device "
            "without microbatches, or write stateful=False."
        )
    layers = [] if own_step else [each for each in model._flatten_layers() if each.quantization_mode == "float8"]
    float8 = {id(v) for layer in layers for v in layer.trainable_variables if v.name.endswith(FLOAT8_NAMES)}
    overwritten = [v.path for v in model.trainable_variables if v.overwrite_with_gradient and id(v) not in float8]
    if overwritten:
        raise UserError(
            f"These variables take gradients as their next values (overwrite_with_gradient): "
            f"{', '.join(shorten_list(overwritten, 4))}. The batch is cut into {num_parts} parts, for replicas and "
            "microbatches. tfdist combines such values of parts for Keras's float8 layers alone, and not in a model's "
            "own train_step. Train on one device without microbatches."
        )


def check_inputs(model: keras.Model, inputs: Any) -> None:
    """Raises UserError where the data gives text and the model takes numbers, or a name that the model does not know.

    The one fails only once the model computes. With the other Keras goes by the names' order and mixes up the inputs.
    """
    known = symbolic_inputs(model)
    if isinstance(known, dict) and isinstance(inputs, dict) and (unknown := set(inputs) - set(known)):
        given, wanted, extra = (", ".join(map(repr, sorted(names))) for names in (inputs, known, unknown))
        raise UserError(f"The data gives the model {given}, and it takes {wanted}. Leave {extra} out of x.")
    takes = [keras.backend.standardize_dtype(each.dtype) for each in getattr(model, "inputs", None) or []]
    gives = [spec.dtype.name for spec in tf.nest.flatten(inputs)]
    if takes and "string" in gives and "string" not in takes:
        raise build_user_error(
            f"The data gives the model text (string), and it takes {', '.join(dict.fromkeys(takes))}. Turn the text "
            "into numbers in the data function. Or give the model a keras.Input of dtype 'string', and a layer such as "
            "keras.layers.TextVectorization behind it.",
            error_id="shape-mismatch",
        )


def trace_loss(model: keras.Model, task: Task, structure: Any, metrics: Sequence[MetricGroup]) -> None:
    """Traces loss and metrics on the shapes of a batch, without computing anything.

    Metrics that make their variables when they first see outputs (F1Score) thus have them outside any graph; Keras's
    stateless scope puts that off till the end of the trace, and keeps the trace from counting anything.
    """

    def loss_and_metrics(examples: Any) -> tf.Tensor:
        objective = forward(model, task, {"examples": examples}, training=bool(seed_generators(model)))
        with keras.StatelessScope(initialize_variables=False):
            for group in metrics:
                task.update_metrics(group.metrics, examples, objective.outputs, None)
        return tf.add_n([*objective.numerators.values()])

    as_tf_function(loss_and_metrics).get_concrete_function(structure)
    with keras.StatelessScope():
        pass  # at its end Keras makes the variables that were asked for in the other one


def describe_model(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> dict[str, str]:
    """Describes both for a comparison of workers: configurations, and variables' shapes, types and trainability.

    The text does not depend on what else a process has built: Keras's own numbers in names are left out.
    """
    trained = {id(v) for v in model.trainable_variables}
    facts = {f"type of the {name}": type(each).__name__ for name, each in (("model", model), ("optimizer", optimizer))}
    for number, variable in enumerate(model.variables):
        path = re.sub(r"_\d+(?=/|$)", "", variable.path)
        is_trained = "trained" if id(variable) in trained else "not trained"
        facts[f"variable {number}, {path}"] = f"{tuple(variable.shape)} {variable.dtype}, {is_trained}"
    settings = _configuration(optimizer)
    facts |= {f"{name} of the optimizer": _without_names(value) for name, value in settings.items() if name != "name"}
    layers = _without_names(_configuration(model))
    facts["digest of the model's configuration"] = hashlib.sha256(layers.encode()).hexdigest()[:16]
    return facts


def _configuration(made: keras.Model | keras.optimizers.Optimizer) -> dict[str, object]:
    """The configuration of a model or an optimizer; empty for a class that has none."""
    try:
        return dict(made.get_config())
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return {}


def _without_names(value: object) -> str:
    """A value as text, without the numbers and addresses that depend on the process."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return re.sub(r"0x[0-9a-f]+", "", re.sub(r'_\d+"', '"', text))


def check_metric_sums(model: keras.Model, task: Task, structure: Any, num_replicas: int) -> None:
    """Raises UserError where a metric of the user's own would not be that of one device.

    Args:
      model: built, and not sharded.
      task: bound to it.
      structure: of a batch.
      num_replicas: of the run; one replica reports whatever the metric keeps.
    """
    if num_replicas == 1:
        return
    metrics = MetricGroup(task.metric_specs())
    packages = {n: type(m).__module__.partition(".")[0] for n, m in zip(metrics.names, metrics.metrics, strict=True)}
    if set(packages.values()) <= KNOWN_PACKAGES:
        return
    try:
        unsummed = _metrics_without_sum(model, task, metrics, tf.nest.map_structure(_make_example_outputs, structure))
    except Exception:  # what a model or a metric makes of such examples says nothing of those to come
        return
    if wrong := ", ".join(repr(name) for name in unsummed if packages[name] not in KNOWN_PACKAGES):
        raise UserError(
            f"The metric {wrong} is not made of sums over examples, so {num_replicas} replicas, which add up "
            "its variables, would report another value than one device. Have update_state add to its variables, and "
            "result combine the sums, or leave it out; add_variable(…, aggregation='mean') gives a mean of replicas."
        )


def _make_example_outputs(spec: tf.TensorSpec) -> tf.Tensor:
    shape = [MOST_ROWS, *(4 if size is None else size for size in spec.shape[1:])]
    values = np.random.default_rng(0).random(shape) if spec.dtype.is_floating else np.zeros(shape)
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.cast(values, spec.dtype)


def _metrics_without_sum(model: keras.Model, task: Task, metrics: MetricGroup, examples: Any) -> list[str]:
    """The names of the metrics whose result is another one where the two halves of a batch are counted apart."""
    with keras.StatelessScope():  # what layers count or draw stays as it is
        whole_outputs = forward(model, task, {"examples": examples}, training=False).outputs

    def states(rows: slice) -> list[np.ndarray]:
        part, outputs = (
            tf.nest.map_structure(lambda each: None if each is None else each[rows], some)
            for some in (examples, whole_outputs)
        )
        metrics.reset()
        task.update_metrics(metrics.metrics, part, outputs, None)
        return [np.array(variable.value) for variable in metrics.variables]

    whole, *halves = (states(rows) for rows in (slice(None), slice(MOST_ROWS // 2), slice(MOST_ROWS // 2, None)))
    added = [
        sum(each) if variable.aggregation == ADDED else alike
        for variable, alike, *each in zip(metrics.variables, whole, *halves, strict=True)
    ]
    names, last = [], 0
    for name, metric in zip(metrics.names, metrics.metrics, strict=True):
        first, last = last, last + len(metric.variables)
        results = [result_of(metric, [tf.constant(each) for each in some[first:last]]) for some in (whole, added)]
        one, other = (np.concatenate([np.ravel(each) for each in tf.nest.flatten(result)]) for result in results)
        if not np.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True):
            names.append(name)
    return names
