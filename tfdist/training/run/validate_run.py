"""What can be checked without training: what `--mode=validate` does once the arguments are of the right kinds.

Says what it finds in lines for the user; ends with a UserError at the first thing that is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import user_code
from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline
from tfdist.data.sources import failures
from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.source import Source, describe_structure
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.data.transforms.mapped import FirstExamples
from tfdist.errors import UserError, build_user_error
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.recompute import choose_layers
from tfdist.storage import files
from tfdist.strategies.strategy import Strategy, Topology
from tfdist.tasks.task import OwnSteps, Task
from tfdist.telemetry.console.console_text import count_text
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.callbacks import is_backup
from tfdist.training.loop.learner import ModelBuilder, build_model, check_divisible, check_fit, check_metric_sums
from tfdist.training.recovery import origins, survival
from tfdist.training.recovery.weights import find_exported
from tfdist.training.run import assembly
from tfdist.training.run.compiled import parts_of
from tfdist.training.run.eval_sets import EvalSet, name_split
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import EvaluateSettings, TrainedSettings, TrainSettings
from tfdist.training.step.gradients import explain_errors, forward, quotients
from tfdist.training.step.metrics import MetricGroup
from tfdist.training.step.normalization import microbatch_note
from tfdist.training.step.optimizer import bind_schedules, build_optimizer, parts, sample_rates, steps_before_swa
from tfdist.training.step.own_step import LARGEST_DIFFERENCE, compare_halves, refuse_padding, trace_step
from tfdist.training.step.precision import as_tf_function, set_precision
from tfdist.training.step.randomness import shuffle_note

Tell = Callable[[str], None]
MAX_ROWS = 8  # of the first batch, on which the loss is computed


def check_training(settings: TrainSettings, model: ModelBuilder, tell: Tell) -> None:
    """Builds all that a training needs, on this process alone, without a step; `model` is its builder."""
    set_precision(settings.precision)
    replicas = _report_strategy(tell, settings.strategy)
    with tempfile.TemporaryDirectory(prefix="tfdist-validate-") as scratch:
        source = _open_source(settings.train_data, scratch)
        training = settings.plan(source.num_examples, replicas)
        batches = {"training": _report_data(tell, "training", source, training)}
        splits = {"training": source}
        evaluated, evaluated_batches = _open_eval_sets(settings.eval_sets, scratch, replicas, tell)
        splits, batches = splits | evaluated, batches | evaluated_batches
    model, optimizer, task = parts_of(None, model, settings.optimizer, settings.task, source.structure)
    if isinstance(task, OwnSteps):
        assembly.check_own_step_settings(settings)
        refuse_padding(training)
        _check_own_steps(model(), {split: each.structure for split, each in splits.items()}, batches["training"], tell)
        return
    built = build_model(model, task, source.structure)
    metrics = MetricGroup(task.metric_specs())
    check_fit(built, task, source.structure, [metrics])
    check_divisible(built, num_parts=training.total_parts)
    for split, each in splits.items():
        if each.structure != source.structure:
            check_fit(built, task, each.structure, [metrics])
        assembly.check_examples(task, built, each, split)
        _check_first_batch(built, task, batches[split], split, tell)
    check_metric_sums(built, task, source.structure, replicas)
    patches = Patches()  # which nothing undoes, as the model goes
    made = build_optimizer(optimizer, built, patches)
    assembly.check_reported(settings, metrics, task, made, training)
    if settings.start is not None:
        survival.check_weights(built, settings.start, tell=as_event_log(tell))
    for note in (microbatch_note(built, training), shuffle_note(built, training)):
        if note is not None:
            tell(f"note: {note}")
    tell(f"model: {built.name}, {built.count_params():,} parameters; metrics: {', '.join(['loss', *metrics.names])}")
    own_values = sum(np.size(variable) for variable in made.variables)
    tell(f"optimizer: {type(made).__name__}, {own_values:,} values of its own")
    if settings.recompute is not None:
        recomputed = [layer.name for layer in choose_layers(built, settings.recompute)]
        tell(f"computed again in the backward pass: {', '.join(recomputed)}")
    run_length = assembly.length_of(settings, training)
    bind_schedules(made, run_length, built.trainable_variables, patches)
    steps_before_swa(made, settings.swa_start, run_length)
    for one in parts(made):
        _report_schedule(tell, one, run_length.total_steps)


def build_alone(settings: TrainSettings, builder: ModelBuilder) -> keras.Model:
    """Builds the model of a training, for examples as its data has."""
    set_precision(settings.precision)
    with tempfile.TemporaryDirectory(prefix="tfdist-model-") as scratch:
        structure = _open_source(settings.train_data, scratch).structure
    model, _, task = parts_of(None, builder, settings.optimizer, settings.task, structure)
    return model() if isinstance(task, OwnSteps) else build_model(model, task, structure)


def as_event_log(tell: Tell) -> Any:
    """A log of events that tells the messages of its warnings."""
    return types.SimpleNamespace(warning=lambda event, *, message, **_: tell(message), info=lambda *_, **__: None)


def check_evaluation(settings: EvaluateSettings, model: ModelBuilder, tell: Tell) -> None:
    """Checks an evaluation, as `check_training` a training."""
    set_precision(settings.precision)
    replicas, task = _report_strategy(tell, settings.strategy), settings.task
    with tempfile.TemporaryDirectory(prefix="tfdist-validate-") as scratch:
        sources, batches = _open_eval_sets(settings.eval_sets, scratch, replicas, tell)
    structures = [source.structure for source in sources.values()]
    if task is None:
        model, _, task = parts_of(None, model, None, None, structures[0])
    if isinstance(task, OwnSteps):
        for structure in structures:
            _trace_own_step(model(), "test_step", structure, tell)
        return
    built = build_model(model, task, structures[0])
    for split, structure in zip(sources, structures, strict=True):
        check_fit(built, task, structure, [MetricGroup(task.metric_specs())])
        _check_first_batch(built, task, batches[split], split, tell)
    tell(f"model: {built.name}, {built.count_params():,} parameters")


def _check_own_steps(model: keras.Model, structures: Mapping[str, Any], examples: Any, tell: Tell) -> None:
    """Traces the model's own steps, and says where replicas would change what it learns."""
    _trace_own_step(model, "train_step", structures["training"], tell)
    for split in structures.keys() - {"training"}:
        _trace_own_step(model, "test_step", structures[split], tell)
    if len(tf.nest.flatten(examples)[0]) < 2:
        return
    difference = compare_halves(model, tf.nest.map_structure(lambda each: each[:MAX_ROWS], examples))
    if difference is not None and difference > LARGEST_DIFFERENCE:
        tell(
            f"note: {type(model).__name__}.train_step is no mean over its batch: the gradients of a batch and the mean "
            f"of those of its halves differ by {difference:.0%}. Each replica computes it on its own rows, so the "
            "number of replicas changes the training. Divide sums by the rows. For a loss over pairs of examples take "
            "tfdist.tasks.contrastive."
        )


def _trace_own_step(model: keras.Model, method: str, structure: Any, tell: Tell) -> None:
    step = trace_step(model, method, structure)
    count = sum(np.size(weight) for weight in model.weights)
    tell(f"model: {model.name}, {count:,} parameters; its {method} returns {', '.join(step.values)}")
    for optimizer, variables in step.updates:
        tell(f"optimizer: {type(optimizer).__name__}, for {count_text(len(variables), 'variable')}")


def check_use(
    settings: TrainedSettings, model: ModelBuilder, task: Task, data: Callable[[], Any], strategy: Strategy, tell: Tell
) -> None:
    """Checks what a trained model is used for without targets: `task` takes the inputs out of the examples."""
    set_precision(settings.precision)
    replicas = _report_strategy(tell, strategy)
    with tempfile.TemporaryDirectory(prefix="tfdist-validate-") as scratch:
        source = _open_source(data, scratch)
        _report_evaluation(tell, source, settings.global_batch_size, replicas, settings.NAME)
    built = build_model(model, task, source.structure)
    with explain_errors(source.structure):
        call = as_tf_function(lambda inputs: built(inputs, training=False))
        call.get_concrete_function(task.inputs(source.structure))
    tell(f"model: {built.name}, {built.count_params():,} parameters")


def _report_schedule(tell: Tell, optimizer: keras.optimizers.Optimizer, total_steps: int) -> None:
    """Says some of the learning rates of a run, where they change."""
    rates = sample_rates(optimizer, total_steps)
    values = [rate for _, rate in rates]
    if len(rates) > 1:
        shown = [rates[i] for i in sorted({0, values.index(max(values)), len(rates) // 2, len(rates) - 1})]
        tell(f"learning rate: {', '.join(f'{rate:.3g} at step {step:,}' for step, rate in shown)}")


def _report_evaluation(tell: Tell, source: Source, batch_size: int, replicas: int, split: str = "evaluation") -> Any:
    plan = BatchPlan(num_examples=source.num_examples, global_batch_size=batch_size, num_replicas=replicas)
    return _report_data(tell, split, source, plan)


def _report_strategy(tell: Tell, strategy: Strategy) -> int:
    strategy.check_alone()
    expected = strategy.expected_replicas()
    reason = f" ({strategy.reason})" if strategy.reason else ""
    replicas = "as many replicas as the hardware has" if expected is None else count_text(expected, "replica")
    tell(f"strategy: {strategy.name}, {replicas}{reason}")
    return expected or 1


def _open_source(data: Callable[[], Any], scratch: str) -> Source:
    source = as_source(data)
    source.prepare(scratch)
    return source


def _open_eval_sets(
    sets: Mapping[str, tuple[EvalSet, int]], scratch: str, replicas: int, tell: Tell
) -> tuple[dict[str, Source], dict[str, Any]]:
    """Opens the sets of an evaluation and says what they hold; their sources and first batches, by split."""
    sources, batches = {}, {}
    for name, (each, batch_size) in sets.items():
        split = name_split(name)
        sources[split] = each.take_batches(_open_source(each.data, scratch), batch_size, split)
        batches[split] = _report_evaluation(tell, sources[split], batch_size, replicas, split)
    return sources, batches


def _report_data(tell: Tell, split: str, source: Source, plan: BatchPlan) -> Any:
    """Says what a split holds; its first batch."""
    tell(
        f"{split} data: {source.num_examples:,} examples of {describe_structure(source.structure)}; "
        f"{count_text(plan.steps_per_epoch, 'step')} of {plan.global_batch_size} an epoch"
    )
    for line in source.describe():
        tell(f"  {line}")
    alone = dataclasses.replace(plan, num_replicas=1)
    failures.clear_errors()
    try:
        batch = next(iter(build_pipeline(source, alone, Topology(0, 1, 1))))["examples"]
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise failures.pop_error() or failures.explain_error(error) or error from error
    for path, values in _named_arrays(batch):
        tell(f"  first batch, {path}: {_describe_values(values.numpy())}")
    return batch


def _describe_values(values: np.ndarray) -> str:
    shown = f"{values.dtype}{list(values.shape)}" if values.dtype != object else f"string{list(values.shape)}"
    if values.size and np.issubdtype(values.dtype, np.number):
        return f"{shown}, {values.min():.4g} … {values.max():.4g}"
    return f"{shown}, such as {values.flat[0]!r}" if values.size else shown


def _check_first_batch(model: keras.Model, task: Task, examples: Any, split: str, tell: Tell) -> None:
    """Tells the loss and the outputs of a batch; raises UserError where they cannot be computed, or are not finite.

    A value that is not finite is refused only where it makes the loss or its gradient so: a model may know what to do
    with it.
    """
    where = f"first batch of the {split} data"
    arrays = tf.nest.map_structure(np.asarray, examples)
    found, rows = _find_not_finite(arrays)
    chosen = tf.nest.map_structure(lambda array: tf.constant(array[rows] if rows else array[:MAX_ROWS]), arrays)

    def compute(part: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        with tf.GradientTape() as tape:
            objective = forward(model, task, {"examples": part}, training=False, batch_size=MAX_ROWS)
            loss = tf.add_n([*objective.numerators.values()])
        seen = quotients(objective)[0], model(task.inputs(part), training=False)
        if not found:
            return loss, *seen
        # Activations may take NaN for 0 on the way forward; the gradients of the weights that met it do not.
        gradients = [g for g in tape.gradient(loss, model.trainable_variables) if g is not None]
        sums = [tf.reduce_sum(tf.convert_to_tensor(g)) for g in gradients]
        return tf.add_n([loss, *(0.0 * tf.cast(each, loss.dtype) for each in sums)]), *seen

    try:
        total, mean, outputs = as_tf_function(compute)(chosen)
    except tf.errors.OpError as error:
        refused = user_code.refused_values(error)
        raise refused or user_code.build_error(f"The model or the loss, on the {where},", error) from error
    if np.isfinite(total):
        outputs = tf.nest.map_structure(np.asarray, outputs)
        shown = [f"{path} {_describe_values(each)}" for path, each in _named_arrays(outputs, "outputs")]
        tell(f"{where}: loss {float(mean):.4g}; {', '.join(shown)}")
        for note in task.describe_mismatches(model, outputs):
            tell(f"note: {note}")
        return
    if found:
        raise build_user_error(
            f"The {where} holds values that are not finite, and so the loss or its gradient is not: {found}. Fix or "
            "leave out such examples.",
            error_id="not-finite-data",
        )
    raise build_user_error(
        f"The loss on the {where} is {float(total)}, though all its values are finite. Look for a logarithm or a "
        "division in the model or the loss that meets 0, and for values that are too large.",
        error_id="not-finite-data",
    )


def _find_not_finite(examples: Any) -> tuple[str, list[int]]:
    """The first value that is not finite in each array, `x holds nan in example 3`, and these examples' rows."""
    found, rows = [], set()
    for name, array in _named_arrays(examples):
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            place = tuple(np.argwhere(~np.isfinite(array))[0])
            found.append(f"{name} holds {array[place]} in example {place[0]:,}")
            rows.add(int(place[0]))
    return ", ".join(found), sorted(rows)


def _named_arrays(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a nest of examples with their places in it: x, y, x.upper …"""
    if isinstance(nest, Mapping):
        for name in nest:
            yield from _named_arrays(nest[name], f"{path}.{name}".strip("."))
    elif isinstance(nest, tuple | list):
        names = ("x", "y", "sample_weight") if not path and len(nest) <= 3 else map(str, range(len(nest)))
        for name, part in zip(names, nest, strict=False):
            yield from _named_arrays(part, f"{path}.{name}".strip("."))
    else:
        yield path or "examples", nest


STEPS = 2


def shorten(settings: TrainSettings, request: Request) -> tuple[TrainSettings, Request]:
    """Shortens a training to two steps, with an evaluation of two batches, in a directory below the run's."""
    few = {name: _take_first(each.data, STEPS * size) for name, (each, size) in settings.eval_sets.items()}
    short = dataclasses.replace(
        settings,
        fast_check=False,
        train_data=_take_first(settings.train_data, STEPS * settings.global_batch_size),
        eval_data=few.get("", few or None),
        epochs=None,
        steps=STEPS,
        steps_per_epoch=STEPS,
        eval_every=1,
        stop_after_epochs=None,
        callbacks=[callback for callback in settings.callbacks if not is_backup(callback)],
        sinks=(),
    )
    run_dir = files.join(request.run_dir, "fast_check")
    return short, dataclasses.replace(request, run_dir=run_dir, profile=None, begins_empty=True)


def read_exported_weights(directory: RunDirectory) -> dict[str, np.ndarray]:
    """Reads the weights of the exported model, by their paths in its file."""
    with origins.open_arrays(find_exported(directory).path) as (_, arrays):
        return {name: array.read() for name, array in arrays.items()}


def compare_weights(trained: Mapping[str, np.ndarray], restored: Mapping[str, np.ndarray]) -> None:
    """Raises UserError where a checkpoint did not give back the weights that were trained."""
    for name, value in trained.items():
        is_float = value.dtype.kind in "fV"  # V is bfloat16's; statistics that are computed again may round differently
        is_same = functools.partial(np.allclose, rtol=1e-5, atol=1e-7, equal_nan=True) if is_float else np.array_equal
        if name not in restored or not is_same(value, restored[name]):
            raise UserError(
                f"train.fast_check: {name} came back from the checkpoint with other values than it was saved with. "
                "A run that is interrupted would not go on as it was. Does the model change this weight when it is "
                "built or called?"
            )


def _take_first(data: Callable[[], Any], count: int) -> Callable[[], Any]:
    def load_few() -> Any:
        source = as_source(data)
        return source if isinstance(source, StreamSource) else FirstExamples(source, count)

    return load_few
