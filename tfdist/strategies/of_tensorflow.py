"""A `tf.distribute.Strategy` that the user made, as one of ours: whose scope a model was made in says who trains it.

Invariant: the same TensorFlow strategy gives the same one of ours, and none is made twice. `keras_fit` asks.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.base import Notify, Strategy, Topology, connected_over
from tfdist.strategies.one_device import OneDevice

ONE_PROCESS = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)
OTHERS = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.ParameterServerStrategy,
)


def strategy_over(distribution: tf.distribute.Strategy) -> Strategy:
    """The strategy for what was made in the scope of `distribution`; one device for TensorFlow's default.

    Raises:
      UserError: it is none that tfdist trains under.
    """
    known = connected_over(distribution)
    if known is not None:
        return known
    if isinstance(distribution, OTHERS):
        raise UserError(
            f"The model was made in the scope of a tf.distribute.{type(distribution).__name__}, which tfdist does not "
            "train under as it is. Make it in the scope of one of tfdist.strategies, such as "
            "multi_worker.MultiWorker()."
        )
    if not isinstance(distribution, ONE_PROCESS):
        return OneDevice()
    found = OfTensorFlow(distribution)
    found.connect()
    return found


class OfTensorFlow(Strategy):
    """The devices of this process, by a strategy of TensorFlow's that exists already."""

    trains_alone = True

    def __init__(self, distribution: tf.distribute.Strategy) -> None:
        super().__init__()
        self._given = distribution
        self.name = "mirrored" if distribution.num_replicas_in_sync > 1 else "one_device"

    def expected_replicas(self) -> int:
        return self._given.num_replicas_in_sync

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        return self._given, Topology(0, 1, num_local_replicas=self._given.num_replicas_in_sync)
