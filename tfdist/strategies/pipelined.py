"""The devices of one machine, each with some of the model's layers, through which microbatches follow each other."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import UserError, build_user_error
from tfdist.settings.checks import whole_number
from tfdist.strategies.mirrored import split_cpu
from tfdist.strategies.strategy import Notify, Strategy, Topology


class Pipelined(Strategy):
    """One replica, whose layers are spread over devices in stages.

    Args:
      stages: names of the layers at which the second stage begins, the third …; each stage has a device. The model's
        own layers count, in their order, and what is inside of them is where they are.
      num_cpu_devices: 0 uses the GPUs that TensorFlow finds. N > 0 splits the CPU into N logical devices, to try it
        on a machine without GPUs.

    Raises:
      UserError: the settings are wrong.
    """

    name = "pipelined"
    trains_alone = True
    feeds_one_device = True

    def __init__(self, stages: Sequence[str], num_cpu_devices: int = 0) -> None:
        super().__init__()
        names = [] if isinstance(stages, str) else list(stages)
        if not names or not all(isinstance(name, str) for name in names):
            raise UserError(
                f"Pipelined.stages is {stages!r}; write the names of the layers at which the second stage begins, the "
                "third …, such as ['block_2', 'block_4']."
            )
        whole_number(0)("Pipelined.num_cpu_devices", num_cpu_devices)
        self.stages = tuple(names)
        self.num_cpu_devices = num_cpu_devices

    def expected_replicas(self) -> int:
        return 1

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        wanted = len(self.stages) + 1
        kind = "logical CPU devices" if self.num_cpu_devices else "GPUs"
        count = self.num_cpu_devices or len(tf.config.list_physical_devices("GPU"))
        if count < wanted:
            raise build_user_error(
                f"The strategy pipelined has {wanted} stages, and {count} {kind}. Write fewer stages, or to try them "
                f"on logical CPU devices, pipelined.Pipelined.num_cpu_devices = {wanted}.",
                error_id="missing-gpu",
            )
        names = split_cpu(count) if self.num_cpu_devices else [f"GPU:{i}" for i in range(count)]
        self.devices = tuple(f"/device:{name}" for name in names[:wanted])
        return tf.distribute.get_strategy(), Topology(worker_index=0, num_workers=1, num_local_replicas=1)
