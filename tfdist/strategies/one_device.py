"""One process, one device: the reference that every other strategy must agree with.

`LoneReplica` presents a process of Horovod, or a program that a TPU's cores all run, as a `tf.distribute.Strategy`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

from tfdist.errors import UserError, build_user_error
from tfdist.strategies.strategy import Notify, Strategy, Topology


class OneDevice(Strategy):
    """Trains on one device of this machine.

    Args:
      device: "auto" takes the first GPU, or the CPU where there is none; "CPU", "GPU:0", "GPU:1" … name one.
    """

    name = "one_device"
    trains_alone = True
    feeds_one_device = True

    def __init__(self, device: str = "auto") -> None:
        super().__init__()
        if not isinstance(device, str):
            raise UserError(f"OneDevice.device is {device!r}; write 'auto', 'CPU', 'GPU:0', 'GPU:1' …")
        self.device = device

    def expected_replicas(self) -> int:
        return 1

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        use_only(self.device)
        # TensorFlow's default strategy: placement by device visibility, no wrapping of what is run.
        return tf.distribute.get_strategy(), Topology(worker_index=0, num_workers=1, num_local_replicas=1)


def use_only(device: str) -> None:
    """Hides every accelerator but `device` from this process.

    Raises:
      UserError: there is no such device.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if device == "auto":
        chosen = gpus[:1]
    elif device.upper() in ("CPU", "CPU:0"):
        chosen = []
    else:
        kind, _, index = device.upper().partition(":")
        if kind != "GPU" or not (index or "0").isdigit():
            raise UserError(
                f"OneDevice.device is {device!r}, which names no device. Write 'auto', 'CPU', 'GPU:0', 'GPU:1' …"
            )
        chosen = gpus[int(index or 0) : int(index or 0) + 1]
        if not chosen:
            raise build_user_error(
                f"OneDevice.device is {device!r}, but TensorFlow finds {len(gpus)} GPUs here. Write 'auto' or 'CPU'.",
                error_id="missing-gpu",
            )
    tf.config.set_visible_devices(chosen, "GPU")


class LoneReplica(tf.distribute.Strategy):
    """One replica in this process, in sync with others that TensorFlow does not know.

    TensorFlow has no public class to derive a strategy from; the release is pinned, and the equivalence tests run every
    part of this.

    Args:
      device: of the replica; None leaves where it computes to TensorFlow.
      count: of all replicas.
      index: gives this replica's, when a call of it begins.
      add: sums tensors, `tf.IndexedSlices` among them, over the replicas.
    """

    def __init__(
        self, device: str | None, count: int, index: Callable[[], Any], add: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> None:
        super().__init__(_Extended(self, device, count, index, add))


class _Extended(OneDeviceExtended):
    """TensorFlow's one-device strategy with sums over all replicas."""

    def __init__(self, strategy: tf.distribute.Strategy, device: str | None, count: int, index: Any, add: Any) -> None:
        super().__init__(strategy, device or "/device:CPU:0")
        self._count, self._index, self._add, self._has_device = count, index, add, device is not None

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        context = tf.distribute.ReplicaContext(self._container_strategy(), replica_id_in_sync_group=self._index())
        with tf.device(self._device) if self._has_device else contextlib.nullcontext(), context:
            return fn(*args, **kwargs)

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any, options: Any = None) -> Any:
        del options  # they are for TensorFlow's own collectives
        summed = self._add(tf.nest.flatten(value))
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            summed = [tf.convert_to_tensor(each) / tf.cast(self._count, each.dtype) for each in summed]
        return tf.nest.pack_sequence_as(value, summed)

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._count
