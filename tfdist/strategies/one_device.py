"""One process, one device: the reference that every other strategy must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.base import MakeDataset, Notify, Strategy, Topology, prefetch


class OneDevice(Strategy):
    """Trains on one device of this machine.

    Args:
      device: "auto" takes the first GPU, or the CPU where there is none; "CPU", "GPU:0", "GPU:1" … name one.
    """

    name = "one_device"
    trains_alone = True

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

    def distribute(self, make: MakeDataset) -> Iterator[Any]:
        dataset = make(self.topology)
        gpus = tf.config.list_logical_devices("GPU")
        return iter(prefetch(dataset, gpus[0].name) if gpus else dataset)


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
            raise UserError(
                f"OneDevice.device is {device!r}, but TensorFlow finds {len(gpus)} GPUs here. Write 'auto' or 'CPU'.",
                error_id="missing-gpu",
            )
    tf.config.set_visible_devices(chosen, "GPU")
