"""Batch statistics for weights that no training step has seen: averages, and what a callback put back.

Invariant: the weights stay; the moving statistics of batch normalization become the plain means over the batches of one
pass, whatever they were before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_patches.patches import Patches
from tfdist.strategies.base import Strategy
from tfdist.tasks.base import Task
from tfdist.telemetry import heartbeat
from tfdist.training.step.gradients import forward
from tfdist.training.step.layers.normalization import batch_norm_layers
from tfdist.training.step.precision import traced


def renew(
    strategy: Strategy, model: keras.Model, task: Task, iterator: Iterator[Any], *, steps: int, batch_size: int
) -> None:
    """Takes the statistics anew, with the model in training mode. Every worker calls it.

    Args:
      strategy: connected.
      model: with the weights to take them of.
      task: calls the model.
      iterator: local batches.
      steps: how many of them.
      batch_size: the most examples of a global batch.
    """

    def on_replica(batch: dict[str, Any]) -> None:
        whole = {name: value for name, value in batch.items() if name != "splits"}
        forward(model, task, whole, training=True, num_parts=strategy.topology.num_replicas, batch_size=batch_size)

    def step(iterator: Iterator[Any], of_step: tf.Tensor) -> None:
        with Patches() as patches:
            for layer in layers:
                patches.replace(layer, momentum=of_step)
            strategy.run(on_replica, args=(next(iterator),))

    layers = [layer for layer in batch_norm_layers(model) if layer.trainable]
    take = traced(step)
    for index in range(steps):
        heartbeat.beat(heartbeat.EVALUATING)
        take(iterator, tf.constant(index / (index + 1), tf.float32))
    heartbeat.beat(heartbeat.BETWEEN)
