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
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.planning.liveness import Buffer, MemoryTracer
from tfdist.recipes.recompute import AUTO, choose_layers
from tfdist.tpu_compiler.program import Programs, count_bytes, trace_programs
from tfdist.training.run import assembly
from tfdist.training.run.train_settings import TrainSettings
from tfdist.training.sharding.tensor_parallel import choose_splits
from tfdist.training.step.optimizer import bind_schedules, parts, sample_rates
from tfdist.tuning.search import hypermodel

# What tensors take, as TensorFlow's allocator and threads have it, divided by what is found here; fitted to
# the 48 cells of benchmarks/plan.py (performance.md) in November 2026.
ALLOCATED = 1.06
REDUCTION = "XlaAllReduce"
# The numbers of a step that grow along a line with its rows, or with the blocks of its model.
GROWING = (
    *("parameter_bytes", "slot_bytes", "gradient_bytes", "tensor_bytes", "batch_bytes", "num_operations"),
    *("flops", "bytes_moved", "reduced_bytes"),
)
LARGE = 1 << 20  # bytes of a variable that a plan gives no memory


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """A layer whose columns replicas may share; inputs and outputs are an example's."""

    num_bytes: int
    columns: int
    input_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """A layer of the model's own.

    Attributes:
      num_shared: variables that replicas share by train.sharding = 'weights': none of a layer that it refuses; None
        where it leaves the layer whole.
      splits: of layers in it that patterns in train.sharding may split.
    """

    name: str
    num_parameters: int
    trained_bytes: int
    num_shared: int | None = None
    splits: tuple[SplitLayer, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One replica's part of a training step; bytes, flops of multiplications and additions in products.

    Attributes:
      rows: examples of a microbatch on one replica.
      gradient_bytes: of what is trained.
      tensor_bytes: the most that is alive at once besides variables: activations, gradients, what the update needs.
      batch_bytes: of a local batch.
      num_operations: of its graph and its loops, those of every microbatch.
      bytes_moved: that operations read and write, each by itself.
      reduced_bytes: that a replica gives to all-reduces; 0 for one replica.
      num_examples: of the training.
      uncertain: operations whose outputs have shapes that depend on values.
      activation_bytes: the part of `tensor_bytes` that grows with the rows.
      rate: the highest learning rate, and the epochs before it.
    """

    rows: int
    recomputes: bool
    layers: tuple[LayerSize, ...]
    parameter_bytes: int
    slot_bytes: int
    gradient_bytes: int
    tensor_bytes: int
    batch_bytes: int
    num_operations: int
    flops: float
    bytes_moved: float
    reduced_bytes: int
    num_examples: int
    uncertain: tuple[str, ...] = ()
    activation_bytes: int = 0
    rate: tuple[float, float] = (0.0, 0.0)

    @property
    def state_bytes(self) -> int:
        return self.parameter_bytes + self.slot_bytes

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers of parameters by layer; layers whose names differ by a number are one group."""
        found: collections.Counter[str] = collections.Counter()
        for each in self.layers:
            found[each.name.rstrip("0123456789").rstrip("_")] += each.num_parameters
        return {name: count for name, count in found.items() if count}


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
    with trace_programs(changed, hypermodel.builder_of(changed), num_replicas) as programs:
        batch = programs.first_batch
        function = tf.function(lambda given: programs.step.on_batch(given), autograph=False)
        graph = function.get_concrete_function(batch).graph
        tracer = MemoryTracer()
        tracer.trace(graph, [Buffer(0, kept=True) for _ in graph.inputs])
        reductions = [each for each in graph.get_operations() if each.type == REDUCTION]
        model, optimizer = programs.model, programs.optimizer
        return Step(
            rows=rows,
            recomputes=changed.recompute is not None,
            layers=_list_layers(model),
            parameter_bytes=sum(map(count_bytes, model.variables)),
            slot_bytes=sum(map(count_bytes, optimizer.variables)),
            gradient_bytes=sum(map(count_bytes, model.trainable_variables)),
            tensor_bytes=tracer.peak,
            batch_bytes=sum(map(count_bytes, tf.nest.flatten(batch))),
            num_operations=len(graph.get_operations()) + tracer.num_loop_operations,
            flops=tracer.flops,
            bytes_moved=tracer.bytes_moved,
            reduced_bytes=sum(count_bytes(each.inputs[0]) for each in reductions),
            num_examples=programs.num_examples,
            uncertain=tuple(sorted(tracer.unknown)),
            rate=_find_highest_rate(settings, programs),
        )


class EmptyVariable(UninitializedVariable):
    """A variable without memory until something is assigned to it; outside of graphs it reads as zeros."""

    def value(self) -> Any:
        is_empty = tf.executing_eagerly() and not self.is_initialized()
        return tf.zeros(self.shape, self.dtype) if is_empty else super().value()

    read_value = value


@contextlib.contextmanager
def omit_values() -> Iterator[None]:
    """Large variables that Keras creates within this context have no values, so that a graph of them can be traced."""
    initialize_with_value = keras.Variable._initialize

    def initialize(self: Any, value: Any) -> None:
        if not callable(value) or math.prod(self._shape) * tf.as_dtype(self._dtype).size < LARGE:
            initialize_with_value(self, value)
            return
        distribution = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        own = {"shape": self._shape, "dtype": self._dtype, "trainable": self.trainable, "name": self.name}
        self._value = EmptyVariable(**own, distribute_strategy=distribution)

    with Patches() as patches:
        patches.replace(keras.Variable, _initialize=initialize)
        yield


def extrapolate(low: Step, high: Step, share: float) -> Step:
    """The step on the line from one step to another, at a share of the way that may exceed 1."""
    ends = {name: (getattr(low, name), getattr(high, name)) for name in GROWING}
    return dataclasses.replace(
        high, **{name: type(last)(first + (last - first) * share) for name, (first, last) in ends.items()}
    )


def deepen(low: Step, high: Step, depth: int) -> Step:
    """The step of a model with so many equal blocks, block_0, block_1 …, by those of one block fewer and of more."""
    first = next(i for i, each in enumerate(high.layers) if each.name == "block_0")
    count = sum(each.name.startswith("block_") for each in high.layers)
    blocks = (dataclasses.replace(high.layers[first], name=f"block_{index}") for index in range(depth))
    layers = (*high.layers[:first], *blocks, *high.layers[first + count :])
    return dataclasses.replace(extrapolate(low, high, depth - count + 1), layers=layers)


def _list_layers(model: Any) -> tuple[LayerSize, ...]:
    try:
        blocks = choose_layers(model, AUTO)
    except UserError:  # no layer holds layers of its own
        blocks = []
    found = []
    for layer in model.layers:
        trained = layer.trainable_variables
        num_shared = None
        if any(layer is each for each in blocks):
            num_shared = 0 if any(v.regularizer for v in layer.variables) else len(trained)
        num_parameters = sum(math.prod(variable.shape) for variable in layer.variables)
        splits = _list_splits(model, layer)
        found.append(LayerSize(layer.name, num_parameters, sum(map(count_bytes, trained)), num_shared, splits))
    return tuple(found)


def _list_splits(model: Any, outer: Any) -> tuple[SplitLayer, ...]:
    """Lists the layers in a layer that can be split; each sees as many rows of an example as that layer gives."""
    try:
        splits = choose_splits(model, [outer.name], 1)
    except UserError:  # nothing of it can be split
        return ()
    try:
        positions = math.prod(length or 1 for length in outer.output.shape[1:-1])
    except (AttributeError, ValueError):  # it has no output, or several
        positions = 1
    found = []
    for each in splits:
        shape, num_bytes = each.variable.shape, count_bytes(each.variable)
        inputs = 1 if isinstance(each.layer, keras.layers.Embedding) else math.prod(shape[: each.axis])
        scale = positions * num_bytes // math.prod(shape)
        found.append(SplitLayer(num_bytes, shape[each.axis], scale * inputs, scale * math.prod(shape[each.axis :])))
    return tuple(found)


def _find_highest_rate(settings: TrainSettings, programs: Programs) -> tuple[float, float]:
    """Finds the highest learning rate of the training, and the epochs before it."""
    length = assembly.length_of(settings, settings.plan(programs.num_examples, 1))
    with Patches() as patches:
        bind_schedules(programs.optimizer, length, programs.model.trainable_variables, patches)
        rates = sample_rates(parts(programs.optimizer)[0], length.total_steps)
    step, rate = max(rates, key=lambda each: each[1])
    return rate, step / length.steps_per_epoch
