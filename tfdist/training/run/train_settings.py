"""The settings of a training and of an evaluation: what the gin roots `train` and `evaluate` take.

Invariant: settings that exist are of the right kinds and do not contradict each other. What takes a look at files or
at the data is checked when a run begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import keras

from tfdist.checkpoint.policy import AUTO, CHECKPOINT, CheckpointPolicy, resolve_policy
from tfdist.data.batches import BatchPlan, BatchSettings
from tfdist.errors import UserError, is_whole_number
from tfdist.recipes.lengths import is_length
from tfdist.recipes.recompute import AUTO as RECOMPUTE_AUTO
from tfdist.settings.checks import (
    COUNT,
    FUNCTION,
    POSITIVE,
    SEED,
    SWITCH,
    Check,
    checked_later,
    instance_of,
    is_text,
    one_of,
    or_none,
    text,
)
from tfdist.settings.declaration import Settings, setting
from tfdist.strategies import auto
from tfdist.strategies.strategy import Strategy
from tfdist.strategies.sums import PRECISIONS as REDUCED
from tfdist.tasks.task import Task
from tfdist.telemetry.sinks.sink import Sink
from tfdist.training.loop.boundaries import LengthSettings
from tfdist.training.loop.callbacks import check_callbacks, find_backup, policy_of_backup, takes_weights
from tfdist.training.loop.learner import ModelBuilder, OptimizerBuilder
from tfdist.training.recovery.origins import NAMES, StartFrom
from tfdist.training.recovery.rollback import Rollback
from tfdist.training.run.eval_sets import EVAL_DATA, EvalSet, list_eval_sets
from tfdist.training.run.tuned import AUTO_XLA, UNCOMPILED, XLA_CHOICES
from tfdist.training.sharding.shards import SHARDINGS
from tfdist.training.sharding.shards import WEIGHTS as SHARDED_WEIGHTS
from tfdist.training.step.optimizer import check_optimizer_builder
from tfdist.training.step.precision import POLICIES

DETERMINISM = "train.deterministic"
DataFunction = Callable[[], Any]
EvalData: TypeAlias = "DataFunction | EvalSet | Mapping[str, DataFunction | EvalSet]"
ON, OFF = "on", "off"
STRATEGY = instance_of(Strategy, "@mirrored.Mirrored()")
COMPUTES = "who computes; by itself what fits the environment and the devices"
TASK = or_none(instance_of(Task, "@supervised.Supervised()"))
PRECISION = one_of(*POLICIES)
MODEL = checked_later("@my_module.build_model")


def _are_patterns(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(is_text(each) for each in value)


LENGTH = Check("a length, '0.75 of run'", is_length)
RECOMPUTE = Check(
    "a list of patterns, ['block_*'], or 'auto'",
    lambda value: value == RECOMPUTE_AUTO if isinstance(value, str) else _are_patterns(value),
)
WORDS = one_of(*SHARDINGS)
SHARDING = Check(
    f"{WORDS.wanted}, or a list of patterns, ['mlp_*']",
    lambda value: WORDS.accepts(value) or _are_patterns(value),
    hint=WORDS.hint,
)
DETERMINISTIC = Check(
    "True, False, or a whole number of at least 2",
    lambda value: isinstance(value, bool) or is_whole_number(value, least=2),
)
START = Check(
    f"a path; or a pair, ('runs/a', {NAMES.wanted}); or @tfdist.StartFrom()",
    lambda value: (
        isinstance(value, StartFrom)
        or is_text(value)
        or (isinstance(value, (list, tuple)) and len(value) == 2 and is_text(value[0]) and NAMES.accepts(value[1]))
    ),
)
WEIGHTS = Check(
    "'best', 'last', a step such as 1200, or what train.start_from takes",
    lambda value: is_text(value) or is_whole_number(value, least=0),
)
RECOVERY = Check("'on', 'off' or @rollback.Rollback()", lambda value: isinstance(value, Rollback) or value in (ON, OFF))
SINKS = Check(
    "[@prometheus.Prometheus()]",
    lambda value: isinstance(value, (list, tuple)) and all(isinstance(each, Sink) for each in value),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySettings(Settings):
    """The settings of a training that name who gets its events and metrics."""

    sinks: Sequence[Sink] = setting(
        "receive metrics and events: Prometheus, OpenTelemetry, MLflow, Weights & Biases, or a class of your own",
        SINKS,
        (),
        may_change=True,
    )
    price_per_device_hour: float | None = setting(
        "of a device, for the metric cost_usd", or_none(POSITIVE), None, unit="USD", may_change=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings(BatchSettings, LengthSettings, TelemetrySettings):
    """A training: what learns from what, where, and how it is kept."""

    NAME: ClassVar[str] = "train"

    model: ModelBuilder = setting(
        "builds the model in the strategy's scope; also KerasTuner's `build(hp)` or HyperModel",
        MODEL,
    )
    train_data: DataFunction = setting("returns the training examples", FUNCTION)
    strategy: Strategy = setting(COMPUTES, STRATEGY, make_default=auto.choose, may_change=True)
    optimizer: OptimizerBuilder | None = setting(
        "builds the Keras optimizer in the scope; None takes the compiled one",
        checked_later("@keras.optimizers.Adam, or a name, 'adam'"),
        None,
    )
    swa_start: str | int | None = setting(
        "stochastic weight averaging, for an optimizer with use_ema=True: from here on, its average is the plain "
        "mean of the weights",
        or_none(LENGTH),
        None,
    )
    recompute: Sequence[str] | str | None = setting(
        "gradient checkpointing: keeps only the inputs of layers of these names, or with 'auto' of all that contain "
        "layers",
        or_none(RECOMPUTE),
        None,
        may_change=True,
    )
    sharding: str | Sequence[str] | None = setting(
        "what replicas share out: 'optimizer' the optimizer's state; 'host' the same, on the host; 'weights' also "
        "gradients and weights; patterns of layers' names their columns",
        or_none(SHARDING),
        None,
        may_change=True,
    )
    task: Task | None = setting("what is learned; None takes the compiled loss and metrics", TASK, None)
    hyperparameters: Mapping[str, Any] | None = setting(
        "values of a model's `hp`, by name; the others have their defaults",
        checked_later("{'units': 64}"),
        None,
    )
    eval_data: EvalData | None = setting(
        "returns the evaluation examples, or several sets by name; None evaluates nothing", or_none(EVAL_DATA), None
    )
    eval_batch_size: int | None = setting(
        "of one evaluation step; None is global_batch_size", or_none(COUNT), None, unit="examples"
    )
    seed: int = setting("of weights, order and dropout", SEED, 0)
    deterministic: bool | int = setting(
        "the same bits twice on the same number of workers, at some cost in speed; a number: on any number of "
        "replicas up to this",
        DETERMINISTIC,
        False,
    )
    precision: str = setting("'float16' has loss scaling; variables are float32 always", PRECISION, "float32")
    reduce_precision: str | None = setting(
        "of gradients between replicas; sums are in float32. None: as they are",
        or_none(one_of(*REDUCED)),
        None,
    )
    steps_per_call: int | None = setting(
        "in one compiled call; None chooses what takes 0.1 s",
        or_none(COUNT),
        None,
        unit="steps",
        may_change=True,
    )
    xla: str = setting(
        "what XLA compiles: the forward and backward pass, the update, ('on') both, ('loop') on one device steps "
        "together; 'auto' tries them in long runs",
        one_of(*XLA_CHOICES),
        AUTO_XLA,
        may_change=True,
    )
    synchronize_batch_norm: bool = setting(
        "computes batch statistics over the global batch",
        SWITCH,
        True,
    )
    callbacks: Sequence[keras.callbacks.Callback] = setting(
        "of Keras, or of your own", checked_later("[@keras.callbacks.EarlyStopping()]"), ()
    )
    checkpoint: CheckpointPolicy | str = setting(
        "when the run is saved and what is kept",
        CHECKPOINT,
        AUTO,
        may_change=True,
    )
    recovery: Rollback | str = setting(
        "returns to a checkpoint: out of memory, with twice the microbatches; at a NaN, with a tenth of the rate. 'on' "
        "is 'off' where the run is deterministic",
        RECOVERY,
        ON,
        may_change=True,
    )
    accept_changes: bool = setting(
        "resumes with changed settings, and restores what fits, with a warning that names the rest",
        SWITCH,
        False,
        may_change=True,
    )
    start_from: str | tuple[str, Mapping[str, str]] | StartFrom | None = setting(
        "weights of a new run; in a pair, with their names there, by regular expressions for names here",
        or_none(START),
        None,
    )
    log_gradient_norm: bool = setting(
        "logs `gradient_norm`, of all gradients before clipping",
        SWITCH,
        False,
        may_change=True,
    )
    fast_check: bool = setting(
        "trains two steps, evaluates, saves, restores, compares, exports and calls callbacks in RUN_DIR/fast_check, "
        "without beginning the run",
        SWITCH,
        False,
        may_change=True,
    )
    must_report: str | None = setting(
        "a metric without which nothing is trained, for --mode=tune; `val_NAME` for one of the evaluation",
        or_none(text("val_accuracy")),
        None,
        may_change=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer is not None:
            check_optimizer_builder(self.optimizer)
        check_callbacks(self.callbacks)
        self._check_conflicts()

    def _check_conflicts(self) -> None:
        """Raises UserError where two settings contradict each other."""
        sharding, strategy = f"train.sharding = {self.sharding!r}", f"the strategy {self.strategy.name}"
        parts = f"train.deterministic = {self.deterministic}"
        excluded = (
            (self.policy is None, "train.checkpoint = 'off'", ("recovery", "stop_after_epochs")),
            (self.scatters, sharding, ("deterministic", "log_gradient_norm", "recompute", "xla", "reduce_precision")),
            (bool(self.strategy.stages), strategy, ("sharding", "deterministic", "recompute", "xla")),
            (self.canonical_replicas is not None, parts, ("synchronize_batch_norm", "reduce_precision")),
            (self.strategy.is_one_program, strategy, ("reduce_precision",)),
        )
        for applies, what, names in excluded:
            for name in names:
                if applies and self.asks_for(name):
                    value = getattr(self, name)
                    raise UserError(f"train.{name} = {value!r} does not work with {what}. Leave one of the two out.")
        for callback in self.callbacks:
            if self.scatters and takes_weights(callback):
                raise UserError(
                    f"train.callbacks has {type(callback).__name__}, which copies all weights, and {sharding} keeps "
                    "them apart on several replicas. Leave it out (of EarlyStopping: restore_best_weights), or set "
                    "train.sharding = 'optimizer'."
                )

    def asks_for(self, name: str) -> bool:
        """Whether a setting asks for what a training does not do by itself, and others may not work with."""
        if name == "deterministic":
            return self.canonical_replicas is not None
        value = getattr(self, name)
        return value != getattr(TrainSettings, name) and (name, value) not in (("xla", UNCOMPILED), ("recovery", OFF))

    @property
    def scatters(self) -> bool:
        """Whether gradients go to their variable's owner alone."""
        return self.sharding == SHARDED_WEIGHTS or bool(self.split_layers)

    @property
    def split_layers(self) -> Sequence[str]:
        """Patterns of the layers of which each replica has some columns."""
        return () if self.sharding is None or isinstance(self.sharding, str) else self.sharding

    @property
    def canonical_replicas(self) -> int | None:
        """The number of replicas whose bits the run has; None where bits depend on their number."""
        return None if isinstance(self.deterministic, bool) else self.deterministic

    @property
    def start(self) -> StartFrom | None:
        """The weights to start from; partial ones where changes are accepted."""
        start = self.start_from
        if start is None:
            return None
        if not isinstance(start, StartFrom):
            start = StartFrom(start) if isinstance(start, str) else StartFrom(*start)
        return dataclasses.replace(start, partial=start.partial or self.accept_changes)

    @property
    def eval_sets(self) -> dict[str, tuple[EvalSet, int]]:
        """The sets of an evaluation and the examples of their steps, by name."""
        return list_eval_sets(self.eval_data, self.eval_batch_size or self.global_batch_size)

    @property
    def backup(self) -> keras.callbacks.BackupAndRestore | None:
        """The callback that says where, when and how many checkpoints there are; None where the policy does."""
        return find_backup(self.callbacks)

    @property
    def policy(self) -> CheckpointPolicy | None:
        """The policy of the checkpoints; None where there are none."""
        backup = self.backup
        return resolve_policy(self.checkpoint) if backup is None else policy_of_backup(backup, self.checkpoint)

    @property
    def rollback(self) -> Rollback | None:
        """What follows on a step that fails; None ends the run."""
        if isinstance(self.recovery, Rollback):
            return self.recovery
        return Rollback() if self.recovery == ON and self.policy is not None and not self.deterministic else None

    @property
    def pads(self) -> bool:
        """Whether a last batch is filled up, so that all replicas have the same number of examples."""
        return self.strategy.needs_static_shapes or bool(self.split_layers)

    def plan(self, num_examples: int, num_replicas: int) -> BatchPlan:
        """The batches of so many examples for so many replicas.

        Raises:
          UserError: they, or those of `train.deterministic` with a number, cannot be cut so.
        """
        num_microbatches, num_parts = self.num_microbatches, None
        if self.canonical_replicas is not None:
            num_microbatches, num_parts = 1, self.canonical_replicas * num_microbatches
            for what, limit, wrong in (
                ("replicas", num_replicas, num_replicas > num_parts),
                ("examples of a batch", self.global_batch_size, self.global_batch_size < num_parts),
            ):
                if wrong:
                    raise UserError(
                        f"{DETERMINISM} = {self.deterministic} cuts a batch into {num_parts} parts, and there are "
                        f"{limit} {what}. Write a number that fits, or {DETERMINISM} = True."
                    )
        return BatchPlan(
            num_examples=num_examples,
            global_batch_size=self.global_batch_size,
            num_replicas=num_replicas,
            num_microbatches=num_microbatches,
            shuffle_seed=self.seed if self.shuffle else None,
            drop_remainder=self.drop_remainder,
            pad=self.pads,
            num_parts=num_parts,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedSettings(Settings):
    """A trained model and its weights; what has no value has that of the training, if the configuration has one."""

    model: ModelBuilder = setting(
        "as in training; `hp` has the training's values",
        MODEL,
    )
    task: Task | None = setting("as in training", TASK, None)
    global_batch_size: int = setting("of one step over all replicas", COUNT, 256, unit="examples")
    precision: str = setting("as in training", PRECISION, "float32")
    weights: str | int | None = setting(
        "'best', 'last' and a step are checkpoints of the run; also .weights.h5; None: export/model.keras",
        or_none(WEIGHTS),
        None,
    )
    checkpoint: CheckpointPolicy | str = setting("its `keep_best` says what 'best' is", CHECKPOINT, AUTO)

    @property
    def policy(self) -> CheckpointPolicy | None:
        """The policy of the checkpoints; None where there are none."""
        return resolve_policy(self.checkpoint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings(TrainedSettings):
    """An evaluation of trained weights."""

    NAME: ClassVar[str] = "evaluate"

    data: EvalData = setting("returns the examples, or several sets by name", EVAL_DATA)
    strategy: Strategy = setting(COMPUTES, STRATEGY, make_default=auto.choose)
    only_newest: bool = setting("with --follow: passes over checkpoints that a newer one has overtaken", SWITCH, False)

    @property
    def eval_sets(self) -> dict[str, tuple[EvalSet, int]]:
        """The sets and the examples of their steps, by name."""
        return list_eval_sets(self.data, self.global_batch_size)
