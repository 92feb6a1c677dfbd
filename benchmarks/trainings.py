"""The same training three ways: tfdist's step, a loop written by hand, and `keras.Model.fit`.

Each builder returns a function that trains a number of steps and comes back when they are done and their loss and
accuracy are on the host. Used by step.py and scaling.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from measuring import choose_size, time_call
from workloads import Workload, loss, metric, optimizer

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline
from tfdist.data.sources.arrays import ArraySource
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.recompute import recompute_layers
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.supervised import Supervised
from tfdist.tasks.task import OwnSteps
from tfdist.training.loop.boundaries import Pace, Vote
from tfdist.training.loop.learner import build_learner
from tfdist.training.run.assembly import keep_arithmetic
from tfdist.training.run.tuned import COMPILED, LOOP, UNCOMPILED, XlaTrial, xla_variants
from tfdist.training.step.gradients import LocalGradients
from tfdist.training.step.own_step import OwnTrainStep, find_whole_rows
from tfdist.training.step.stacked import StackedSteps, stack_size
from tfdist.training.step.state import Learner
from tfdist.training.step.step import Totals, TrainStep

Train = Callable[[int], None]
SHUFFLE_BUFFER = 10_000  # examples
ENDLESS = 10**12  # steps


def build_training(
    strategy: Strategy,
    workload: Workload,
    *,
    share: int = 1,
    recompute: Sequence[str] | None = None,
    sharding: str | None = None,
    num_microbatches: int = 1,
    num_parts: int | None = None,
    tell: Callable[[str], None] | None = None,
    **step_settings: Any,
) -> tuple[Learner, Train]:
    """tfdist as `experiment.train` puts it together: what is trained, and a function that trains it.

    Args:
      strategy: connected.
      workload: what to train.
      share: takes one part of so many of the global batch.
      recompute, sharding, num_microbatches: as the settings of these names.
      num_parts: sums as with `train.deterministic` of this number.
      tell: has XLA compile what is quickest, as `train.xla = "auto"` does in a long run, and gets what was chosen.
      **step_settings: of `TrainStep`.
    """
    batch = workload.global_batch_size // share
    source, plan = plan_batches(strategy, workload, batch, num_microbatches=num_microbatches, num_parts=num_parts)
    task = Supervised(loss=loss(), metrics=[metric])
    learner = build_learner(
        strategy,
        workload.build_model,
        optimizer,
        task,
        source.structure,
        patches := Patches(),
        precision="float32",
        batch_size=plan.global_batch_size,
        sharding=sharding,
    )
    recompute_layers(learner.model, recompute, patches)
    size = stack_size(strategy, learner, plan, source)

    def build_step(xla: str) -> TrainStep:
        compiles_pass, compiles_update = COMPILED[xla]
        local = LocalGradients(strategy, learner, task, plan, jit_compile=compiles_pass)
        build = functools.partial(StackedSteps, size=size, source=source) if xla == LOOP else TrainStep
        return build(strategy, learner, local, compiles_update=compiles_update, **step_settings)

    steps_done = 0

    def train(step: TrainStep, num_steps: int) -> None:
        nonlocal steps_done
        with keep_arithmetic() if num_parts else contextlib.nullcontext():
            totals, metrics = run_call(step, iterator, steps_done, num_steps)
        steps_done += num_steps
        _copy_to_host(totals.steps, totals.sums, *metrics.values())

    step = build_step(UNCOMPILED)
    iterator = strategy.distribute(lambda topology: build_pipeline(source, plan, topology))
    if tell is not None:
        names = xla_variants(strategy, learner, stacks=size > 1)[: choose_size(None, 1)]
        step = choose_step(strategy, names, step, build_step, train, tell)
    return learner, functools.partial(train, step)


def run_call(
    step: TrainStep, iterator: Iterator[Any], first_step: int, num_steps: int
) -> tuple[Totals, Mapping[str, Any]]:
    """Runs steps of the run from number `first_step` on; returns the totals and the metrics."""
    span = tf.constant(first_step, tf.int64), tf.constant(num_steps)
    totals, metrics, _ = step.run(iterator, *span, Vote().tensor(), tf.zeros([3], tf.float64))
    return totals, metrics


def plan_batches(strategy: Strategy, workload: Workload, batch: int, **settings: Any) -> tuple[ArraySource, BatchPlan]:
    source = ArraySource(workload.arrays())
    count, replicas = source.num_examples, strategy.topology.num_replicas
    plan = BatchPlan(num_examples=count, global_batch_size=batch, num_replicas=replicas, shuffle_seed=0, **settings)
    return source, plan


class OwnStepModel(keras.Model):
    """A functional model with a training step of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            value = self.compute_loss(x, y, logits)
        self.optimizer.apply(tape.gradient(value, self.trainable_weights), self.trainable_weights)
        return self.compute_metrics(x, y, logits) | {"loss": value}


def build_own_model(workload: Workload) -> keras.Model:
    """The workload's model with a training step of its own, compiled."""
    plain = workload.build_model()
    model = OwnStepModel(plain.inputs, plain.outputs[0])
    model.compile(optimizer=optimizer(), loss=loss(), metrics=[metric()])
    return model


def build_own_training(strategy: Strategy, workload: Workload) -> Train:
    """tfdist's step around the model's own; returns a function that trains it."""
    source, plan = plan_batches(strategy, workload, workload.global_batch_size)
    sizes: dict[str, Any] = {"precision": "float32", "batch_size": plan.global_batch_size}
    build = functools.partial(build_own_model, workload)
    learner = build_learner(strategy, build, optimizer, OwnSteps(), source.structure, Patches(), **sizes)
    step = OwnTrainStep(strategy, learner, plan, find_whole_rows(plan, source))
    iterator = strategy.distribute(lambda topology: build_pipeline(source, plan, topology))

    def train(num_steps: int) -> None:
        totals, metrics = run_call(step, iterator, 0, num_steps)
        _copy_to_host(totals.steps, totals.sums, *metrics.values())

    return train


def choose_step(
    strategy: Strategy,
    names: Sequence[str],
    step: TrainStep,
    build_step: Callable[[str], TrainStep],
    train: Callable[[TrainStep, int], None],
    tell: Callable[[str], None],
) -> TrainStep:
    """Trains until XLA's trial has found the quickest of the step's variants with these names."""
    variants = {name: functools.partial(build_step, name) for name in names}
    trial = XlaTrial(strategy, step, variants, ENDLESS, lambda choice, seconds: tell(f"XLA {choice}: {seconds}"))
    pace = Pace(strategy, choose_size(None, 1))
    while not trial.is_over:
        seconds = time_call(train, step, pace.steps_per_call)
        pace.observe(pace.steps_per_call, seconds)
        step = trial.observe(0, pace.steps_per_call, seconds)
    return step


def build_handwritten(workload: Workload, distribution: tf.distribute.Strategy | None = None) -> Train:
    """A loop as a careful person writes it for one model: `tf.range` inside one `tf.function`.

    Under a distribution the optimizer sums the gradients over the replicas, as Keras does by itself.
    """
    with distribution.scope() if distribution else contextlib.nullcontext():
        model, adam, accuracy = workload.build_model(), optimizer(), metric()
        adam.build(model.trainable_variables)
    run = distribution.run if distribution else lambda function, args: function(*args)
    num_replicas = distribution.num_replicas_in_sync if distribution else 1
    mean_loss = loss()

    def on_replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            value = mean_loss(y, logits) / num_replicas
        variables = model.trainable_variables
        adam.apply(tape.gradient(value, [v.value for v in variables]), variables)
        accuracy.update_state(y, logits)
        return value

    @tf.function
    def steps(iterator: Iterator[Any], num_steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        total = tf.constant(0.0)
        for _ in tf.range(num_steps):
            value = run(on_replica, args=next(iterator))
            total += distribution.experimental_local_results(value)[0] if distribution else value
        return total / tf.cast(num_steps, tf.float32), accuracy.result()

    iterator = iter(build_pipeline_by_hand(workload, distribution))
    return lambda num_steps: _copy_to_host(*steps(iterator, tf.constant(num_steps)))


def build_pipeline_by_hand(workload: Workload, distribution: tf.distribute.Strategy | None) -> Any:
    dataset = tf.data.Dataset.from_tensor_slices(workload.arrays()).shuffle(SHUFFLE_BUFFER).repeat()
    dataset = dataset.batch(workload.global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    return distribution.experimental_distribute_dataset(dataset) if distribution else dataset


def build_fit(
    workload: Workload,
    distribution: tf.distribute.Strategy | None = None,
    build_model: Callable[[], keras.Model] | None = None,
) -> Train:
    """`compile` and `fit` with their defaults on arrays, but without a progress bar, which would take its time.

    `num_steps` has to be an epoch's. `build_model` gives a compiled model in place of the workload's.
    """
    with distribution.scope() if distribution else contextlib.nullcontext():
        model = workload.build_model() if build_model is None else build_model()
        if not model.compiled:
            model.compile(optimizer=optimizer(), loss=loss(), metrics=[metric()])
    x, y = workload.arrays()

    def train(num_steps: int) -> None:
        assert num_steps == len(x) // workload.global_batch_size
        model.fit(x, y, batch_size=workload.global_batch_size, verbose=0)

    return train


def _copy_to_host(*tensors: tf.Tensor) -> None:
    for tensor in tensors:
        keras.ops.convert_to_numpy(tensor)
