"""Puts the parts of a training together, out of its settings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline
from tfdist.data.sources import failures
from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.source import Source
from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.recipes.lengths import RunLength
from tfdist.recipes.recompute import recompute_layers
from tfdist.strategies.cluster import environment
from tfdist.tasks.task import STEPS, OwnSteps, Task
from tfdist.telemetry import heartbeat
from tfdist.training.loop.best import OBJECTIVE, check_monitors, direct_monitors, reported_by
from tfdist.training.loop.boundaries import Boundaries
from tfdist.training.loop.evaluation import Evaluator, EvaluatorGroup, OwnEvaluator
from tfdist.training.loop.learner import ModelBuilder, build_learner, check_divisible, check_fit, check_metric_sums
from tfdist.training.recovery.rollback import Rollbacks
from tfdist.training.run.compiled import parts_of
from tfdist.training.run.eval_sets import EvalSet, name_split
from tfdist.training.run.run import Run
from tfdist.training.run.train_settings import DETERMINISM, TrainSettings
from tfdist.training.run.tuned import (
    AUTO_XLA,
    COMPILED,
    LOOP,
    UNCOMPILED,
    XlaTrial,
    can_compile,
    load_xla_choice,
    save_xla_choice,
    xla_variants,
)
from tfdist.training.sharding.shards import HOST
from tfdist.training.step.gradients import LocalGradients
from tfdist.training.step.layer_state import moving_variables
from tfdist.training.step.metrics import MetricGroup
from tfdist.training.step.normalization import batch_norm_layers, is_synchronized, microbatch_note, synchronize
from tfdist.training.step.optimizer import bind_schedules, steps_before_swa
from tfdist.training.step.own_step import OwnTrainStep, find_whole_rows, refuse_padding
from tfdist.training.step.precision import set_precision
from tfdist.training.step.randomness import seed_generators, set_seeds, shuffle_note
from tfdist.training.step.stacked import StackedSteps, stack_size
from tfdist.training.step.state import Learner
from tfdist.training.step.step import TrainStep
from tfdist.training.watch.equality import check_agreement, check_same_batches

NOT_WITH_OWN_STEPS = (
    *("optimizer", "num_microbatches", "deterministic", "sharding", "xla", "swa_start", "reduce_precision"),
    *("log_gradient_norm", "recovery"),
)
REASSOCIATING = ("arithmetic_optimization", "constant_folding")  # of TensorFlow's optimizers of graphs


@dataclasses.dataclass(frozen=True)
class Training:
    """A training, as far as this worker has put it together.

    Attributes:
      patches: end when the training does.
      rate_factor: of the learning rate.
    """

    run: Run
    settings: TrainSettings
    source: Source
    learner: Learner
    task: Task
    plan: BatchPlan
    boundaries: Boundaries
    patches: Patches
    rate_factor: float = 1.0

    @property
    def stack_size(self) -> int:
        """How many batches one program of XLA can take."""
        return stack_size(self.run.strategy, self.learner, self.plan, self.source)


def assemble(
    run: Run, settings: TrainSettings, model: ModelBuilder, patches: Patches, rollbacks: Rollbacks | None = None
) -> Training:
    """Reads the data and builds what learns from it; nothing is traced yet.

    Args:
      run: open.
      settings: of the training.
      model: what `settings.model` builds with.
      patches: end when the training does; model, optimizer and layers are then as the user made them.
      rollbacks: of the run; None for a training that is not run.

    Raises:
      UserError: the data cannot be read, or the parts do not fit together.
      OutOfMemoryError: no batch can be cut into as many microbatches as memory asks for.
    """
    check_agreement(run.strategy, lambda: _plain_settings(settings))
    set_seeds(settings.seed if run.request.seeds else None, deterministic=bool(settings.deterministic))
    set_precision(settings.precision)
    source = open_source(run, settings.train_data, "training")
    parts = parts_of(run.strategy, model, settings.optimizer, settings.task, source.structure, patches)
    task = parts[-1]
    if isinstance(task, OwnSteps):
        check_own_step_settings(settings)
        if rollbacks is not None:
            rollbacks.policy = None
    plan = settings.plan(source.num_examples, run.topology.num_replicas)
    if rollbacks is not None:
        plan = rollbacks.split(plan)
    check_same_batches(run.strategy, source, plan, "training")
    learner = build_learner(
        run.strategy,
        *parts,
        source.structure,
        patches,
        precision=settings.precision,
        batch_size=plan.global_batch_size,
        sharding=settings.sharding if run.topology.num_replicas > 1 or settings.sharding == HOST else None,
    )
    check_reported(settings, learner.eval_metrics, task, learner.optimizer, plan)
    direct_monitors(settings.callbacks, list(settings.eval_sets), patches)
    if learner.shards is None and not isinstance(task, OwnSteps):
        check_metric_sums(learner.model, task, source.structure, run.topology.num_replicas)
    bind_schedules(learner.optimizer, length_of(settings, plan), learner.model.trainable_variables, patches)
    if plan.num_parts is None and not isinstance(task, OwnSteps):  # whose parts are the same for any number of workers
        plan = scale_microbatches(run, learner, plan)
        if (note := microbatch_note(learner.model, plan)) is not None:
            run.note("microbatch_statistics", note)
    if (note := shuffle_note(learner.model, plan)) is not None:
        run.note("shuffled_parts", note)
    in_parts = plan.num_parts is not None
    wanted = settings.synchronize_batch_norm
    synchronize(learner.model, run.strategy, patches, wanted=wanted, pads=plan.pad or in_parts, in_parts=in_parts)
    recompute_layers(learner.model, settings.recompute, patches)
    if settings.deterministic:
        patches.enter_context(keep_arithmetic())
    boundaries = settings.boundaries(plan.steps_per_epoch)
    rate_factor = rollbacks.rate if rollbacks else 1.0
    training = Training(run, settings, source, learner, task, plan, boundaries, patches, rate_factor)
    if settings.xla == LOOP and training.stack_size == 1:
        run.note(
            "single_steps",
            "train.xla = 'loop' acts as 'on': steps run together on one device alone, without sharding, on small "
            "batches of numbers that are held in memory.",
        )
    return training


def check_own_step_settings(settings: TrainSettings) -> None:
    """Raises UserError for what the step of a model's own cannot be combined with: all of it in one message."""
    refused = filter(settings.asks_for, NOT_WITH_OWN_STEPS)
    names = [f"train.{name} = {getattr(settings, name)!r}" for name in refused]
    if settings.strategy.name == "pipelined":
        names.append("train.strategy = @pipelined.Pipelined()")
    if names:
        raise UserError(
            f"The model has a {', '.join(STEPS[:-1])} or {STEPS[-1]} of its own, metrics of layers, or no loss in "
            f"compile(). tfdist runs its steps as they are. Leave out: {', '.join(names)}. Or take the method or the "
            "metrics out, and write the loss in compile(), or as train.task."
        )


def scale_microbatches(run: Run, learner: Learner, plan: BatchPlan) -> BatchPlan:
    """Returns the plan with more microbatches if workers are missing, so that memory suffices.

    A model that takes statistics of its batches keeps its microbatches: they are what it takes the statistics of.
    """
    all_workers = environment.all_workers(environment.current())
    present = run.topology.num_workers
    if all_workers is None or all_workers <= present:
        return plan
    wanted = -(-plan.num_microbatches * all_workers // present)
    fits = plan.global_batch_size >= wanted * plan.num_replicas and not plan.pad
    statistics = [layer.name for layer in batch_norm_layers(learner.model) if layer.trainable]
    if statistics or not fits:
        why = f"the model takes statistics of them ({statistics[0]})" if statistics else "the batch is too small"
        wanted, change = plan.num_microbatches, f"num_microbatches stays {plan.num_microbatches}, as {why}"
    else:
        change = f"each computes its part of a batch in {wanted} slices in place of {plan.num_microbatches}"
    message = f"{present} of {all_workers} workers train; {change}."
    run.events.info("fewer_workers", message=message, num_microbatches=wanted)
    return dataclasses.replace(plan, num_microbatches=wanted)


def length_of(settings: TrainSettings, plan: BatchPlan) -> RunLength:
    """Returns the length of a training, in the units of its schedules."""
    boundaries, steps_of_pass = settings.boundaries(plan.steps_per_epoch), plan.steps_per_epoch
    return RunLength(
        total_steps=boundaries.total_steps,
        steps_per_epoch=boundaries.steps_per_epoch,
        examples_per_epoch=plan.num_examples_until(steps_of_pass) * boundaries.steps_per_epoch / steps_of_pass,
        global_batch_size=plan.global_batch_size,
    )


def check_reported(
    settings: TrainSettings, metrics: MetricGroup, task: Task, optimizer: keras.optimizers.Optimizer, plan: BatchPlan
) -> None:
    """Raises UserError where the settings or a callback name a metric that the training will not report."""
    reported = reported_by(metrics, task, sets=list(settings.eval_sets))
    reported.check(OBJECTIVE, settings.must_report)
    check_monitors(settings, reported, optimizer, settings.boundaries(plan.steps_per_epoch))


def open_source(run: Run, data: Callable[[], Any], split: str) -> Source:
    """Opens the source of a data function, prepared on every worker: on the chief first, for the others to find.

    The chief tells in one line what the `split` ("training", "evaluation") holds.

    Raises:
      UserError: the data cannot be read; on every worker, where it is the chief that fails.
    """
    heartbeat.beat(heartbeat.PREPARING)
    strategy, failed = run.strategy, f"The {split} data cannot be read"
    source = strategy.on_every_worker(lambda: as_source(data))
    strategy.on_chief(lambda: source.prepare(run.directory.fitted), failed)
    if not run.topology.is_chief:
        source.prepare(run.directory.fitted)
    check_agreement(
        strategy, lambda: _describe_source(source, split), advice="Give all workers the same files and the same code."
    )
    if run.topology.is_chief:
        lines = source.describe()
        run.events.info(
            "data_opened",
            message=f"{split} data: {source.num_examples:,} examples{'; ' + lines[0] if lines else ''}",
            split=split,
            num_examples=source.num_examples,
            description=lines,
        )
    return source


def _plain_settings(settings: TrainSettings) -> dict[str, object]:
    """The settings that are plain values, by the names that gin files take."""
    found = {f"{settings.NAME}.{name}": getattr(settings, name) for name in settings.declarations()}
    return {name: value for name, value in found.items() if value is None or isinstance(value, str | int | float)}


def _describe_source(source: Source, split: str) -> dict[str, object]:
    """Describes what the workers compare of a source."""
    facts = {
        f"examples of the {split} data": source.num_examples,
        f"structure of an example of the {split} data": source.structure,
    }
    return facts | {f"records in each file of the {split} data": list(source.file_sizes)}


def check_examples(task: Task, model: keras.Model, source: Source, split: str) -> None:
    """Raises UserError where the model cannot learn from an example that lies in memory."""
    held = source.arrays_in_memory()
    if held is not None:
        task.check_examples(model, held, split)


def stream(run: Run, source: Source, plan: BatchPlan, *, first_step: int = 0) -> Iterator[Any]:
    """This worker's local batches, from a step on.

    Raises:
      UserError: they would have to be made where Python does not run.
    """
    if source.calls_python and run.strategy.num_hosts > 1:
        raise UserError(
            f"A {type(source).__name__} reads by Python code, which runs on the first of the {run.strategy.num_hosts} "
            "hosts of this TPU alone. Give arrays that fit into memory, or use a slice of one host."
        )
    return run.strategy.distribute(lambda topology: build_pipeline(source, plan, topology, first_step=first_step))


def choose_xla(training: Training) -> tuple[str, list[str]]:
    """Chooses what of the step XLA compiles, and what a trial may try while the run goes on. A collective.

    An earlier start may have made the choice.
    """
    run, settings = training.run, training.settings
    if isinstance(training.task, OwnSteps):
        return UNCOMPILED, []
    if settings.xla != AUTO_XLA:
        return settings.xla, []
    options = {"deterministic": bool(settings.deterministic), "stacks": training.stack_size > 1}
    names = xla_variants(run.strategy, training.learner, **options)
    choice = load_xla_choice(run.strategy, run.directory.tuned, names, run.warn_of_file) if names else None
    return choice or UNCOMPILED, names if choice is None else []


def build_step(training: Training, xla: str | None = None) -> TrainStep:
    """The training step, with so much of it compiled by XLA; None: as `choose_xla` says.

    Raises:
      UserError: the examples do not fit the model, or what is trained cannot be trained so.
    """
    run, settings, learner, plan = training.run, training.settings, training.learner, training.plan
    if xla is None:
        heartbeat.beat(heartbeat.BUILDING)
        check_examples(training.task, learner.model, training.source, "training")
        xla, _ = choose_xla(training)
    compiles_pass, compiles_update = COMPILED[xla]
    if isinstance(training.task, OwnSteps):
        return OwnTrainStep(run.strategy, learner, plan, find_whole_rows(plan, training.source))
    check_divisible(learner.model, num_parts=plan.total_parts)
    if compiles_pass and plan.num_replicas > 1 and not run.strategy.is_one_program:
        _check_compilable(learner.model, xla)
    if settings.canonical_replicas is not None:
        _check_canonical(learner.model, settings, xla)
    size = training.stack_size if xla == LOOP else 1
    build = functools.partial(StackedSteps, size=size, source=training.source) if size > 1 else TrainStep
    return build(
        run.strategy,
        learner,
        LocalGradients(run.strategy, learner, training.task, plan, jit_compile=compiles_pass),
        log_gradient_norm=settings.log_gradient_norm,
        rate_factor=training.rate_factor,
        compiles_update=compiles_update,
        swa_start=steps_before_swa(learner.optimizer, settings.swa_start, length_of(settings, plan)),
        reduce_precision=settings.reduce_precision,
        deterministic=bool(settings.deterministic),
    )


def xla_trial(training: Training, step: TrainStep) -> XlaTrial | None:
    """Builds the trial that settles `train.xla = "auto"` while the run goes on; None where nothing is open."""
    run = training.run
    _, names = choose_xla(training)
    if not names:
        return None

    def variant(name: str) -> TrainStep | None:
        step = build_step(training, name)
        with failures.raise_recorded_errors():
            batch = next(stream(run, training.source, training.plan))
        return step if can_compile(run.strategy, training.learner, step, batch) else None

    return XlaTrial(
        run.strategy,
        step,
        {name: functools.partial(variant, name) for name in names},
        training.boundaries.last_step,
        functools.partial(save_xla_choice, run.strategy, run.directory.tuned, tell=run.events.info),
    )


def open_eval_sets(run: Run, sets: Mapping[str, tuple[EvalSet, int]]) -> dict[str, tuple[Source, int]]:
    """Opens the sets of an evaluation: their sources and batch sizes by name.

    Raises:
      UserError: one cannot be read, or cut to a number of batches.
    """
    sources = {}
    for name, (each, batch_size) in sets.items():
        split = name_split(name)
        sources[name] = each.take_batches(open_source(run, each.data, split), batch_size, split), batch_size
    return sources


def build_evaluator(training: Training) -> EvaluatorGroup | None:
    """An evaluator of a training's evaluation data; None without such data.

    Raises:
      UserError: the examples do not fit the model.
    """
    learner, sets = training.learner, open_eval_sets(training.run, training.settings.eval_sets)
    if not sets:
        return None
    parts = learner.model, training.task, sets, training.patches
    known = learner.eval_metrics, training.source.structure
    return evaluator_of(training.run, *parts, known=known, pads=training.settings.pads)


def evaluator_of(
    run: Run,
    model: keras.Model,
    task: Task,
    sets: Mapping[str, tuple[Source, int]],
    patches: Patches,
    *,
    known: tuple[MetricGroup, Any] | None = None,
    pads: bool = False,
) -> EvaluatorGroup:
    """An evaluator of all examples of some sets, each once.

    Args:
      run: open.
      model: built.
      task: gives loss and metrics, but for a model whose own `test_step` evaluates it.
      sets: sources and batch sizes, by name.
      patches: of the model's use.
      known: metrics for the first set, and the structure of examples that they and the model are known to take.
      pads: as `TrainSettings` has it; always where the strategy needs it.

    Raises:
      UserError: an example does not fit the model.
    """
    evaluators: dict[str, Evaluator] = {}
    metrics, structure = known or (None, None)
    names = None if metrics is None else metrics.names
    for name, (source, batch_size) in sets.items():
        plan = BatchPlan(
            num_examples=source.num_examples,
            global_batch_size=batch_size,
            num_replicas=run.topology.num_replicas,
            pad=pads or run.strategy.needs_static_shapes,
        )
        check_same_batches(run.strategy, source, plan, name_split(name))
        if isinstance(task, OwnSteps):
            refuse_padding(plan)
            evaluators[name] = OwnEvaluator(run, model, source, stream(run, source, plan), plan, patches)
            continue
        with run.strategy.scope():
            if evaluators or metrics is None:
                metrics, structure = MetricGroup(task.metric_specs(), names), None
            if structure != source.structure:
                check_fit(model, task, source.structure, [metrics])
        check_examples(task, model, source, name_split(name))
        evaluators[name] = Evaluator(run, model, task, metrics, stream(run, source, plan), plan)
    return EvaluatorGroup(evaluators)


@contextlib.contextmanager
def keep_arithmetic() -> Iterator[None]:
    """Has TensorFlow compute, while it lasts, in the order in which the program is written.

    Its arithmetic optimizer goes through tables whose order depends on addresses of memory: it rewrites a product of
    scalars in one process otherwise than in another one. Its constant folding moves constants through products and
    sums, by what else is in the graph: otherwise where replicas share it, or where one of them owns an update.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(dict.fromkeys(REASSOCIATING, False))
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before.get(name, True) for name in REASSOCIATING})


def _check_compilable(model: keras.Model, xla: str) -> None:
    """Raises UserError where a pass sums over replicas in its middle, which XLA cannot compile."""
    names = [each.name for each in batch_norm_layers(model) if each.trainable and is_synchronized(each)]
    if names:
        raise UserError(
            f"train.xla = {xla!r} compiles the pass, in which {names[0]!r} takes its statistics over all replicas. "
            "Write train.xla = 'update' or 'auto'."
        )


def _check_canonical(model: keras.Model, settings: TrainSettings, xla: str) -> None:
    """Raises UserError where the bits would depend on the number of replicas."""
    parts, strategy = settings.deterministic, settings.strategy
    if settings.swa_start is not None and batch_norm_layers(model):
        raise UserError(
            f"{DETERMINISM} = {parts} takes batch statistics over whole batches, and train.swa_start takes those of "
            f"the averaged weights by replica. Leave it out, or write {DETERMINISM} = True."
        )
    if COMPILED[xla][1]:
        raise UserError(
            f"{DETERMINISM} = {parts} gives several replicas of a process the bits of one, and XLA compiles the update "
            f"of one alone. Write train.xla = 'pass'. Received: {xla!r}."
        )
    if xla != UNCOMPILED and any(layer.trainable for layer in batch_norm_layers(model)):
        raise UserError(
            f"{DETERMINISM} = {parts} takes batch statistics over whole batches, which XLA cannot compile. Write "
            f"train.xla = 'off'. Received: {xla!r}."
        )
    layers = [layer for layer in batch_norm_layers(model) if type(layer) is keras.layers.BatchNormalization]
    statistics = [variable for layer in layers for variable in layer.non_trainable_variables]
    known = {id(variable) for variable in (*statistics, *(generator.state for generator in seed_generators(model)))}
    kept = [variable.path for variable in moving_variables(model) if id(variable) not in known]
    if kept:
        raise UserError(
            f"{DETERMINISM} = {parts} is for models whose layers keep nothing of a batch, but for Keras's "
            f"BatchNormalization. Each part may move {kept[0]!r} along. Take such a layer out."
        )
    if strategy.needs_static_shapes or strategy.is_one_program:
        raise UserError(
            f"{DETERMINISM} = {parts} is not for the strategy {strategy.name}, whose collectives sum by themselves."
        )
