"""What an experiment's training step needs, from its own traced graph: memory, operations, bytes to be reduced.

Invariant: the step is put together as a run's is, by `assembly`, and only traced. The state on one replica is that of
the model's and the optimizer's variables; what else is alive follows from the graph (`liveness`). With several replicas
the reductions are the step's own, found in the graph as the all-reduces that a TPU's program would have.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import keras
import psutil
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from tfdist.data.pipeline import PREFETCHED_STEPS
from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.planning.liveness import Buffer, MemoryTracer
from tfdist.recipes.recompute import AUTO, choose_layers
from tfdist.tpu_compiler.program import Programs, count_bytes, trace_programs
from tfdist.training.run import assembly
from tfdist.training.run.train_settings import TrainSettings
from tfdist.training.sharding.tensor_parallel import choose_splits
from tfdist.training.step.optimizer import bind_schedules, learning_rate, parts
from tfdist.tuning.search import hypermodel

# Two figures fitted, November 2026, to the 48 cells of benchmarks/plan.py (performance.md): what tensors take, as
# TensorFlow's allocator and threads have it, divided by what is found here,
ALLOCATED = 1.06
# and what a process that runs a graph keeps of each of its operations.
OPERATION_BYTES = 11 * 1024
REDUCTION = "XlaAllReduce"
NUM_RATES = 100  # of a run, of which the highest is looked for
LARGE = 1 << 20  # bytes of a variable that a plan gives no memory


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """A layer whose columns replicas may share; inputs and outputs are an example's."""

    num_bytes: int
    columns: int
    input_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One replica's part of a training step; bytes, flops of multiplications and additions in products.

    Attributes:
      rows: examples of a microbatch on one replica.
      parameters: numbers of the model's variables, by layer group.
      gradient_bytes: of what is trained.
      tensor_bytes: the most that is alive at once besides variables: activations, gradients, what the update needs.
      batch_bytes: of a local batch.
      num_operations: of its graph and its loops, those of every microbatch.
      process_bytes: by how much the process that traced it grew, model and optimizer included.
      bytes_moved: that operations read and write, each by itself.
      reduced_bytes: that a replica gives to all-reduces; 0 for one replica.
      num_examples: of the training.
      uncertain: operations whose outputs have shapes that depend on values.
      activation_bytes: the part of `tensor_bytes` that grows with the rows.
      layers: the model's own, with the bytes that are trained in each.
      blocks: bytes and number of variables of those that train.sharding = 'weights' would share; of one that it
        refuses, no variables.
      splits: of layers that patterns in train.sharding may split.
      rate: the highest learning rate, and the epochs before it.
    """

    rows: int
    recomputes: bool
    parameters: dict[str, int]
    parameter_bytes: int
    slot_bytes: int
    gradient_bytes: int
    tensor_bytes: int
    batch_bytes: int
    num_operations: int
    process_bytes: int
    flops: float
    bytes_moved: float
    reduced_bytes: int
    num_examples: int
    uncertain: tuple[str, ...] = ()
    activation_bytes: int = 0
    layers: tuple[tuple[str, int], ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    splits: tuple[SplitLayer, ...] = ()
    rate: tuple[float, float] = (0.0, 0.0)

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.slot_bytes

    @property
    def host_bytes(self) -> float:
        """By how much a process grows that computes on the processor; batches are read ahead."""
        kept = self.process_bytes + OPERATION_BYTES * self.num_operations
        return kept + ALLOCATED * self.tensor_bytes + PREFETCHED_STEPS * self.batch_bytes


def trace_step(
    settings: TrainSettings,
    *,
    rows: int,
    num_microbatches: int = 1,
    num_replicas: int = 1,
    precision: str | None = None,
    recompute: Any = None,
) -> Step:
    """Traces the step with so many examples of a microbatch on each replica.

    Args:
      settings: of the training.
      precision, recompute: in place of the settings'; None leaves those.

    Raises:
      UserError: the experiment cannot be put together so.
    """
    changed = dataclasses.replace(
        settings,
        global_batch_size=rows * num_microbatches * num_replicas,
        num_microbatches=num_microbatches,
        precision=precision or settings.precision,
        recompute=recompute or settings.recompute,
        drop_remainder=False,
        eval_data=None,
        callbacks=(),
        sharding=None,
        must_report=None,
        fast_check=False,
    )
    process = psutil.Process()
    before = process.memory_info().rss
    with trace_programs(changed, hypermodel.builder_of(changed), num_replicas) as programs:
        batch = programs.first_batch
        function = tf.function(lambda given: programs.step.on_batch(given), autograph=False)
        graph = function.get_concrete_function(batch).graph
        grown = process.memory_info().rss - before
        tracer = MemoryTracer()
        tracer.trace(graph, [Buffer(0, kept=True) for _ in graph.inputs])
        reductions = [each for each in graph.get_operations() if each.type == REDUCTION]
        model, optimizer = programs.model, programs.optimizer
        return Step(
            rows=rows,
            recomputes=changed.recompute is not None,
            parameters=_count_parameters(model),
            parameter_bytes=sum(map(count_bytes, model.variables)),
            slot_bytes=sum(map(count_bytes, optimizer.variables)),
            gradient_bytes=sum(map(count_bytes, model.trainable_variables)),
            tensor_bytes=tracer.peak,
            batch_bytes=sum(map(count_bytes, tf.nest.flatten(batch))),
            num_operations=len(graph.get_operations()) + tracer.num_loop_operations,
            process_bytes=grown,
            flops=tracer.flops,
            bytes_moved=tracer.bytes_moved,
            reduced_bytes=sum(count_bytes(each.inputs[0]) for each in reductions),
            num_examples=programs.num_examples,
            uncertain=tuple(sorted(tracer.unknown)),
            layers=tuple((each.name, _trained_bytes(each)) for each in model.layers),
            blocks=_list_blocks(model),
            splits=_list_splits(model),
            rate=_find_highest_rate(settings, programs),
        )


class EmptyVariable(UninitializedVariable):
    """A variable without memory until something is assigned to it; outside of graphs it reads as zeros."""

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        if tf.executing_eagerly() and not self.is_initialized():
            return tf.zeros(self.shape, self.dtype)
        return super()._read_variable_op(no_copy)


@contextlib.contextmanager
def omit_values() -> Iterator[None]:
    """Large variables that Keras creates within this context have no values, so that a graph of them can be traced."""
    initialize_with_value = keras.Variable._initialize_with_initializer

    def initialize(self: Any, initializer: Any) -> None:
        if math.prod(self._shape) * tf.as_dtype(self._dtype).size < LARGE:
            initialize_with_value(self, initializer)
            return
        distribution = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        own = {"shape": self._shape, "dtype": self._dtype, "trainable": self.trainable, "name": self.name}
        self._initialize(EmptyVariable(**own, distribute_strategy=distribution))

    with Patches() as patches:
        patches.replace(keras.Variable, _initialize_with_initializer=initialize)
        yield


def deepen(one: Step, two: Step, depth: int) -> Step:
    """The step of a model with so many equal blocks, block_0, block_1 …, by those of one and of two blocks."""

    def extend(name: str) -> Any:
        low, high = getattr(one, name), getattr(two, name)
        if isinstance(high, dict):
            return {key: low.get(key, 0) + (high[key] - low.get(key, 0)) * (depth - 1) for key in high}
        if isinstance(high, tuple):
            more = collections.Counter(high) - collections.Counter(low)
            return (*high, *(depth - 2) * list(more.elements()))
        return type(high)(low + (high - low) * (depth - 1))

    numbers = ("parameter_bytes", "slot_bytes", "gradient_bytes", "tensor_bytes", "num_operations", "flops")
    names = (*numbers, "parameters", "blocks", "splits", "bytes_moved", "reduced_bytes")
    last = next(i for i, (name, _) in enumerate(two.layers) if name == "block_1")
    blocks = [(f"block_{index}", two.layers[last][1]) for index in range(1, depth)]
    layers = (*two.layers[:last], *blocks, *two.layers[last + 1 :])
    return dataclasses.replace(two, **{name: extend(name) for name in names}, layers=layers)


def _trained_bytes(layer: Any) -> int:
    return sum(map(count_bytes, layer.trainable_variables))


def _list_blocks(model: Any) -> tuple[tuple[int, int], ...]:
    try:
        blocks = choose_layers(model, AUTO)
    except UserError:  # no layer holds layers of its own
        return ()
    counts = (0 if any(v.regularizer for v in each.variables) else len(each.trainable_variables) for each in blocks)
    return tuple(zip(map(_trained_bytes, blocks), counts, strict=True))


def _list_splits(model: Any) -> tuple[SplitLayer, ...]:
    """Lists the layers that can be split; each sees as many rows of an example as its model's layer gives."""
    found = []
    for outer in model.layers:
        try:
            splits = choose_splits(model, [outer.name], 1)
        except UserError:  # nothing of it can be split
            continue
        try:
            positions = math.prod(length or 1 for length in outer.output.shape[1:-1])
        except (AttributeError, ValueError):  # it has no output, or several
            positions = 1
        for each in splits:
            shape, size = each.variable.shape, count_bytes(each.variable) // math.prod(each.variable.shape)
            inputs = 1 if isinstance(each.layer, keras.layers.Embedding) else math.prod(shape[: each.axis])
            outputs = math.prod(shape[each.axis :])
            ends = (positions * size * inputs, positions * size * outputs)
            found.append(SplitLayer(count_bytes(each.variable), shape[each.axis], *ends))
    return tuple(found)


def _find_highest_rate(settings: TrainSettings, programs: Programs) -> tuple[float, float]:
    """Finds the highest learning rate of the training, and the epochs before it."""
    length = assembly.length_of(settings, settings.plan(programs.num_examples, 1))
    steps = [round(part * (length.total_steps - 1) / NUM_RATES) for part in range(NUM_RATES + 1)]
    rates = []
    with Patches() as patches:
        bind_schedules(programs.optimizer, length, programs.model.trainable_variables, patches)
        for step in steps:
            parts(programs.optimizer)[0].iterations.assign(step)
            rates.append(learning_rate(programs.optimizer))
    return max(rates), steps[rates.index(max(rates))] / length.steps_per_epoch


def _count_parameters(model: Any) -> dict[str, int]:
    """Numbers of parameters by the outermost layer that holds them; layers that differ by a number are one group."""
    found: collections.Counter[str] = collections.Counter()
    for layer in model.layers:
        count = sum(math.prod(variable.shape) for variable in layer.variables)
        if count:
            found[layer.name.rstrip("0123456789").rstrip("_")] += count
    return dict(found)
