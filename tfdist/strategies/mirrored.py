"""The devices of one machine: a copy of the model on each, gradients summed between them."""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import UserError, build_user_error
from tfdist.settings.checks import whole_number
from tfdist.strategies.strategy import Notify, Strategy, Topology


class Mirrored(Strategy):
    """`tf.distribute.MirroredStrategy`.

    Args:
      num_cpu_devices: 0 uses the GPUs that TensorFlow finds. N > 0 splits the CPU into N logical devices, to try a
        run of N replicas on a machine without GPUs.
    """

    name = "mirrored"
    trains_alone = True

    def __init__(self, num_cpu_devices: int = 0) -> None:
        super().__init__()
        whole_number(0)("Mirrored.num_cpu_devices", num_cpu_devices)
        self.num_cpu_devices = num_cpu_devices

    def expected_replicas(self) -> int:
        return self.num_cpu_devices or len(self._gpus())

    def _gpus(self) -> list[tf.config.PhysicalDevice]:
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            raise build_user_error(
                "The strategy mirrored needs GPUs, and TensorFlow finds 0 here. To try it on logical CPU devices, "
                "write mirrored.Mirrored.num_cpu_devices = 2.",
                error_id="missing-gpu",
            )
        return gpus

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        if self.num_cpu_devices:
            devices = split_cpu(self.num_cpu_devices)
        else:
            tf.config.set_visible_devices(self._gpus(), "GPU")
            devices = [f"GPU:{i}" for i in range(self.expected_replicas())]
        # Between parts of one CPU a plain sum is quicker than a collective, and leaves the process's collectives alone.
        reduction = tf.distribute.ReductionToOneDevice() if self.num_cpu_devices else None
        distribution = tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)
        return distribution, Topology(worker_index=0, num_workers=1, num_local_replicas=len(devices))


def split_cpu(count: int) -> list[str]:
    """Makes `count` logical devices of the CPU and returns their names.

    Raises:
      UserError: TensorFlow has started already, and with another number of devices.
    """
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        if len(tf.config.list_logical_devices("CPU")) != count:
            raise UserError(
                f"The CPU cannot be split into {count} devices any more: TensorFlow computed something before the "
                "strategy was set up. In a script, make the model in the strategy's scope. In an experiment, make no "
                "tensors, variables, layers or metrics at the top level of a module that the gin file imports."
            ) from error
    return [f"CPU:{i}" for i in range(count)]
