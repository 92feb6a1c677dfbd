"""The replicas of a TPU as one XLA program, for its compiler: what they compute is traced, and nothing is run.

Invariant: a step traced under this strategy is the step of `TPU` with as many cores, its reductions lowered to the
all-reduce that a TPU executes. `tfdist.tpu_compiler` uses it; no configuration names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from tfdist.strategies.base import MakeDataset, Notify, Strategy, Topology
from tfdist.strategies.tpu import TPU


class TpuProgram(Strategy):
    """Args: num_replicas: cores of the slice."""

    name = TPU.name
    needs_static_shapes = TPU.needs_static_shapes
    is_one_program = TPU.is_one_program

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self._num_replicas = num_replicas

    def expected_replicas(self) -> int:
        return self._num_replicas

    def distribute(self, make: MakeDataset) -> Iterator[Any]:
        return iter(make(self.topology))

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        return _Distribution(self._num_replicas), Topology(0, 1, num_local_replicas=self._num_replicas)


class _Distribution(tf.distribute.Strategy):
    def __init__(self, num_replicas: int) -> None:
        super().__init__(_Extended(self, num_replicas))


class _Extended(OneDeviceExtended):
    """One device, in whose place each replica stands once."""

    def __init__(self, strategy: tf.distribute.Strategy, num_replicas: int) -> None:
        super().__init__(strategy, "/device:CPU:0")
        self._count = num_replicas

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        index = gen_xla_ops.xla_replica_id() if tf.inside_function() else 0
        with tf.distribute.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=index):
            return fn(*args, **kwargs)

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any, options: Any = None) -> Any:
        del options  # they are for TensorFlow's own collectives
        all_replicas = [list(range(self._count))]
        summed = [
            gen_xla_ops.xla_all_reduce(
                tf.convert_to_tensor(each), group_assignment=all_replicas, reduce_op="Add", mode="CrossReplica"
            )
            for each in tf.nest.flatten(value)
        ]
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            summed = [each / tf.cast(self._count, each.dtype) for each in summed]
        return tf.nest.pack_sequence_as(value, summed)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._count
