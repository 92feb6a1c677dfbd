"""Chooses a strategy from TF_CONFIG, Horovod's environment, a TPU and GPUs; or from the scope that a model was made in.

Invariant: the same TensorFlow strategy gives the same one of ours, and a process joins others once.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.errors import UserError
from tfdist.settings.checks import FUNCTION
from tfdist.strategies.cluster import environment
from tfdist.strategies.cluster.tf_config import read_tf_config
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Notify, Strategy, Topology, find_connected, find_joined, has_begun
from tfdist.strategies.tpu import TPU

WRAPPED = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)


def choose(
    *,
    one_device: Callable[[], Strategy] = OneDevice,
    mirrored: Callable[[], Strategy] = Mirrored,
    multi_worker: Callable[[], Strategy] = MultiWorker,
    horovod: Callable[[], Strategy] = Horovod,
    tpu: Callable[[], Strategy] = TPU,
) -> Strategy:
    """The strategy that fits this process's environment and devices; its `reason` says why.

    In a process that has joined others it is the one by which it did.

    Each argument makes one strategy, so that a gin file can set what matters if that one is chosen.

    Raises:
      UserError: an argument makes nothing, or TF_CONFIG is set and wrong.
    """
    makers = {
        "one_device": one_device,
        "mirrored": mirrored,
        "multi_worker": multi_worker,
        "horovod": horovod,
        "tpu": tpu,
    }
    for name, make in makers.items():
        FUNCTION(f"auto.choose.{name}", make)
    if (joined := find_joined()) is not None:
        return joined
    variables = environment.current()
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    tpu_mark = environment.first_set(environment.TPU_MARKS, variables)
    if read_tf_config(variables) is not None:
        strategy, why = multi_worker(), "TF_CONFIG is set"
    elif mark := environment.find_horovod(variables):
        strategy, why = horovod(), f"{mark} is set"
    elif tf.config.list_physical_devices("TPU"):
        strategy, why = tpu(), "TensorFlow finds a TPU on this machine"
    elif tpu_mark is not None:
        strategy, why = tpu(), f"{tpu_mark} is set"
    elif num_gpus > 1:
        strategy, why = mirrored(), f"{num_gpus} GPUs were found"
    else:
        why = "one GPU was found" if num_gpus else "no GPU, TF_CONFIG, Horovod or TPU was found"
        strategy = one_device()
    strategy.reason = f"auto: {why}"
    return strategy


choose_strategy = choose  # as `tfdist` names it


def join_before_first_operation() -> None:
    """Has this process join the others of its run when TensorFlow first computes, unless a strategy connects before.

    TensorFlow's collectives cannot be set up later, and a script's model exists before `tfdist.fit` is called.
    """
    tensorflow_context = context.context()
    initialize = tensorflow_context.ensure_initialized

    def join() -> None:
        del tensorflow_context.ensure_initialized
        if not has_begun() and tensorflow_context._collective_leader is None:  # a strategy of the script's own sets it
            with tf.init_scope():  # TensorFlow may be building a graph
                choose().connect()
        initialize()

    tensorflow_context.ensure_initialized = join


def wrap_strategy(distribution: tf.distribute.Strategy) -> Strategy:
    """The strategy for what was made in the scope of `distribution`.

    Raises:
      UserError: it is none that tfdist trains under.
    """
    known = find_connected(distribution)
    if known is not None:
        return known
    if not isinstance(distribution, WRAPPED):
        raise UserError(
            f"The model was made in the scope of a {type(distribution).__name__}, which tfdist does not train under as "
            "it is. Make it in the scope of one of tfdist.strategies, such as multi_worker.MultiWorker()."
        )
    strategy = WrappedStrategy(distribution)
    strategy.connect()
    return strategy


class WrappedStrategy(Strategy):
    """The devices of this process, by a strategy of TensorFlow's that exists already."""

    trains_alone = True

    def __init__(self, distribution: tf.distribute.Strategy) -> None:
        super().__init__()
        self._wrapped = distribution
        self.name = "mirrored" if distribution.num_replicas_in_sync > 1 else "one_device"

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        return self._wrapped, Topology(0, 1, num_local_replicas=self._wrapped.num_replicas_in_sync)
