"""What an experiment's training step needs, from its own traced graph: memory, operations, bytes to be reduced.

Invariant: the step is put together as a run's is, by `assembly`, and only traced. The state on one replica is that of
the model's and the optimizer's variables; what else is alive follows from the graph (`liveness`). With several replicas
the reductions are the step's own, found in the graph as the all-reduces that a TPU's program would have.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import psutil
import tensorflow as tf

from tfdist.data.pipeline import PREFETCHED_STEPS
from tfdist.planning.liveness import Buffer, MemoryTracer
from tfdist.tpu_compiler.program import count_bytes, trace_programs
from tfdist.training.run.train_settings import TrainSettings
from tfdist.tuning.search import hypermodel

# Two figures fitted, November 2026, to the 48 cells of benchmarks/plan.py (performance.md): what tensors take, as
# TensorFlow's allocator and threads have it, divided by what is found here,
ALLOCATED = 1.06
# and what a process that runs a graph keeps of each of its operations.
OPERATION_BYTES = 11 * 1024
REDUCTION = "XlaAllReduce"


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
        )


def _count_parameters(model: Any) -> dict[str, int]:
    """Numbers of parameters by the outermost layer that holds them; layers that differ by a number are one group."""
    found: collections.Counter[str] = collections.Counter()
    for layer in model.layers:
        count = sum(math.prod(variable.shape) for variable in layer.variables)
        if count:
            found[layer.name.rstrip("0123456789").rstrip("_")] += count
    return dict(found)
