"""Picks a strategy from what is found: TF_CONFIG, Horovod's environment, a TPU, GPUs; else one device."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.settings.checks import FUNCTION
from tfdist.strategies.base import Strategy
from tfdist.strategies.cluster import environment
from tfdist.strategies.cluster.tf_config import read_tf_config
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.tpu import TPU


def choose(
    *,
    one_device: Callable[[], Strategy] = OneDevice,
    mirrored: Callable[[], Strategy] = Mirrored,
    multi_worker: Callable[[], Strategy] = MultiWorker,
    horovod: Callable[[], Strategy] = Horovod,
    tpu: Callable[[], Strategy] = TPU,
) -> Strategy:
    """The strategy that fits this process's environment and devices; its `reason` says why.

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
    variables = environment.current()
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    tpu_mark = environment.first_set(environment.TPU_MARKS, variables)
    if read_tf_config(variables) is not None:
        strategy, why = multi_worker(), "TF_CONFIG is set"
    elif mark := environment.first_set(environment.HOROVOD_MARKS, variables):
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
