"""What can be checked without training: what `--mode=validate` does once the arguments are of the right kinds.

Says what it finds in lines for the user; ends with a UserError at the first thing that is wrong.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline.pipeline import build_pipeline
from tfdist.data.sources import failures
from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.source import Source
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.recompute import chosen_layers
from tfdist.strategies.base import Strategy, Topology
from tfdist.tasks.base import Task
from tfdist.telemetry.console.formatting import curve
from tfdist.training.loop.learner import ModelBuilder, build_model, check_divisible, check_fit
from tfdist.training.recovery import survival
from tfdist.training.run import assembly
from tfdist.training.run.checking.examples import check_first_batch, named_arrays
from tfdist.training.run.checking.metric_sums import metrics_without_sum
from tfdist.training.run.compiled import parts_of
from tfdist.training.run.settings import EvaluateSettings, TrainedSettings, TrainSettings
from tfdist.training.step.gradients import explained
from tfdist.training.step.layers.normalization import microbatch_note
from tfdist.training.step.metrics import MetricGroup
from tfdist.training.step.optimizer import bind_schedules, build_optimizer, parts, steps_before_swa
from tfdist.training.step.precision import set_precision, traced

Tell = Callable[[str], None]
CURVE_COLUMNS = 72


def check_training(settings: TrainSettings, model: ModelBuilder, tell: Tell) -> None:
    """Builds all that a training needs, on this process alone, without a step; `model` is its builder."""
    set_precision(settings.precision)
    replicas = _tell_strategy(tell, settings.strategy)
    with tempfile.TemporaryDirectory(prefix="tfdist-validate-") as scratch:
        source = _opened(settings.train_data, scratch)
        training = settings.plan(source.num_examples, replicas)
        batches = {"training": _tell_data(tell, "training", source, training)}
        splits = {"training": source}
        if settings.eval_data is not None:
            splits["evaluation"] = held = _opened(settings.eval_data, scratch)
            batch_size = settings.eval_batch_size or settings.global_batch_size
            batches["evaluation"] = _tell_evaluation(tell, held, batch_size, replicas)
    model, optimizer, task = parts_of(None, model, settings.optimizer, settings.task, source.structure)
    built = build_model(model, task, source.structure)
    metrics = MetricGroup(task.metric_specs())
    check_fit(built, task, source.structure, [metrics])
    check_divisible(built, num_parts=training.num_replicas * training.num_microbatches)
    for split, each in splits.items():
        if each.structure != source.structure:
            check_fit(built, task, each.structure, [metrics])
        assembly.check_examples(task, built, each, split)
        check_first_batch(built, task, batches[split], split)
    with explained(source.structure):
        unsummed = metrics_without_sum(built, task, metrics, batches["training"])
    if unsummed:
        tell(
            f"note: {', '.join(unsummed)}: no sum over examples, nor made of such sums. Several replicas, which add up "
            "the variables of a metric, report another value than one device."
        )
    patches = Patches()  # which nothing undoes, as the model goes
    made = build_optimizer(optimizer, built, patches)
    assembly.check_reported(settings, metrics, task, made)
    path, names = settings.start
    if path is not None:
        survival.check_weights(built, path, names=names, partial=settings.accept_changes, tell=_Warnings(tell))
    note = microbatch_note(
        built, num_microbatches=training.num_microbatches, global_batch_size=training.global_batch_size
    )
    if note is not None and settings.canonical_replicas is None:
        tell(f"note: {note}")
    tell(f"model: {built.name}, {built.count_params():,} parameters; metrics: {', '.join(['loss', *metrics.names])}")
    tell(f"optimizer: {type(made).__name__}, {sum(_size(v) for v in made.variables):,} values of its own")
    if settings.recompute is not None:
        tell(f"computed again in the backward pass: {', '.join(_names(chosen_layers(built, settings.recompute)))}")
    run_length = assembly.length_of(settings, training)
    bind_schedules(made, run_length, built.trainable_variables, patches)
    steps_before_swa(made, settings.swa_start, run_length)
    for one in parts(made):
        _tell_schedule(tell, one._learning_rate, run_length.total_steps)


def check_evaluation(settings: EvaluateSettings, model: ModelBuilder, tell: Tell) -> None:
    """The same for an evaluation."""
    set_precision(settings.precision)
    replicas, task = _tell_strategy(tell, settings.strategy), settings.task
    with tempfile.TemporaryDirectory(prefix="tfdist-validate-") as scratch:
        source = _opened(settings.data, scratch)
        batch = _tell_evaluation(tell, source, settings.global_batch_size, replicas)
    if task is None:
        model, _, task = parts_of(None, model, None, None, source.structure)
    built = build_model(model, task, source.structure)
    check_fit(built, task, source.structure, [MetricGroup(task.metric_specs())])
    check_first_batch(built, task, batch, "evaluation")
    tell(f"model: {built.name}, {built.count_params():,} parameters")


def check_use(
    settings: TrainedSettings, model: ModelBuilder, task: Task, data: Callable[[], Any], strategy: Strategy, tell: Tell
) -> None:
    """The same for what a trained model is used for without targets: `task` takes the inputs out of the examples."""
    set_precision(settings.precision)
    replicas = _tell_strategy(tell, strategy)
    with tempfile.TemporaryDirectory(prefix="tfdist-validate-") as scratch:
        source = _opened(data, scratch)
        _tell_evaluation(tell, source, settings.global_batch_size, replicas, settings.NAME)
    built = build_model(model, task, source.structure)
    with explained(source.structure):
        traced(lambda inputs: built(inputs, training=False)).get_concrete_function(task.inputs(source.structure))
    tell(f"model: {built.name}, {built.count_params():,} parameters")


def _tell_schedule(tell: Tell, schedule: Any, total_steps: int) -> None:
    """Draws the learning rates of a run, and says some; nothing where they stay."""
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return
    steps = [round(i * (total_steps - 1) / (CURVE_COLUMNS - 1)) for i in range(CURVE_COLUMNS)]
    rates = [float(schedule(np.int64(step))) for step in steps]
    for line in curve(rates):
        tell(f"  {line}")
    highest = int(np.argmax(rates))
    shown = dict.fromkeys([0, *([highest] if 0 < highest < CURVE_COLUMNS - 1 else []), CURVE_COLUMNS // 2, -1])
    tell(f"learning rate: {', '.join(f'{rates[i]:.3g} at step {steps[i]:,}' for i in shown)}")


def _tell_evaluation(tell: Tell, source: Source, batch_size: int, replicas: int, split: str = "evaluation") -> Any:
    plan = BatchPlan(num_examples=source.num_examples, global_batch_size=batch_size, num_replicas=replicas)
    return _tell_data(tell, split, source, plan)


@dataclasses.dataclass(frozen=True)
class _Warnings:
    """Tells what is passed over in a directory of checkpoints."""

    tell: Tell

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        pass

    def warning(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        self.tell(message or event)


def _tell_strategy(tell: Tell, strategy: Strategy) -> int:
    strategy.check_alone()
    expected = strategy.expected_replicas()
    reason = f" ({strategy.reason})" if strategy.reason else ""
    replicas = "as many replicas as the hardware has" if expected is None else counted(expected, "replica")
    tell(f"strategy: {strategy.name}, {replicas}{reason}")
    return expected or 1


def _opened(data: Callable[[], Any], scratch: str) -> Source:
    source = as_source(data(), data)
    source.prepare(scratch)
    return source


def _tell_data(tell: Tell, split: str, source: Source, plan: BatchPlan) -> Any:
    """Says what a split holds; its first batch."""
    tell(
        f"{split} data: {source.num_examples:,} examples of {_said(source.structure)}; "
        f"{counted(plan.steps_per_epoch, 'step')} of {plan.global_batch_size} an epoch"
    )
    sharing = source.describe_sharing(trains=split == "training")
    for line in filter(None, [*source.describe(), sharing]):
        tell(f"  {line}")
    alone = dataclasses.replace(plan, num_replicas=1)
    failures.forget()
    try:
        batch = next(iter(build_pipeline(source, alone, Topology(0, 1, 1))))["examples"]
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise failures.take() or failures.explained(error) or error from error
    for path, values in named_arrays(batch):
        tell(f"  first batch, {path}: {_values_said(values.numpy())}")
    return batch


def _values_said(values: np.ndarray) -> str:
    shown = f"{values.dtype}{list(values.shape)}" if values.dtype != object else f"string{list(values.shape)}"
    if values.size and np.issubdtype(values.dtype, np.number):
        return f"{shown}, {values.min():.4g} … {values.max():.4g}"
    return f"{shown}, such as {values.flat[0]!r}" if values.size else shown


def counted(number: int, noun: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _said(structure: Any) -> str:
    described = tf.nest.map_structure(lambda s: f"{s.dtype.name}{s.shape.as_list()[1:]}", structure)
    return str(described).replace("'", "")


def _names(layers: Sequence[keras.layers.Layer]) -> list[str]:
    return [layer.name for layer in layers]


def _size(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0)
