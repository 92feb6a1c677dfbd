"""What is done both on one device, in the tests' own process, and under MirroredStrategy in a child."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from equivalence.cases import one_hot_digits, with_weightless_batch
from training.trainings import softmax_model

from tfdist.strategies.strategy import Strategy
from tfdist.tasks.supervised import Supervised
from tfdist.training.step.normalization import global_moments

MANY_METRICS: dict[str, Any] = {
    "model": softmax_model,
    "train_data": one_hot_digits,
    "eval_data": one_hot_digits,
    "epochs": 1,
    "eval_batch_size": 149,  # leaves one example to two replicas
    "task": lambda: Supervised(
        loss=keras.losses.CategoricalCrossentropy(),
        metrics=[
            lambda: keras.metrics.AUC(name="auc"),
            lambda: keras.metrics.AUC(multi_label=True, name="multi_label_auc"),
            lambda: keras.metrics.Precision(thresholds=0.15, name="precision"),
            lambda: keras.metrics.PrecisionAtRecall(0.5, name="at_recall"),
            lambda: keras.metrics.OneHotMeanIoU(10, name="iou"),
            lambda: keras.metrics.F1Score(name="f1"),  # one number a class
            lambda: keras.metrics.R2Score(name="r2"),  # counts in integers
            lambda: keras.metrics.CosineSimilarity(name="cosine"),
            lambda: keras.metrics.TopKCategoricalAccuracy(3, name="top"),
        ],
    ),
}


WEIGHTLESS: dict[str, Any] = {
    "train_data": with_weightless_batch,
    "eval_data": None,
    "shuffle": False,
    "epochs": 1,
    "deterministic": True,
}


def moments_data(offset: float, *, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [7, 3, 5] around `offset`, and a mask of their first two axes; some that is left out is not finite."""
    random = np.random.default_rng(5)
    inputs = (random.normal(size=(7, 3, 5)) + offset).astype(np.float32)
    mask = random.uniform(size=(7, 3)) < 0.6
    if masked:
        inputs[~mask] = 1e6
    return inputs, mask


def moments(strategy: Strategy, offset: float, masked: bool) -> dict[str, Any]:
    """Mean, variance and the gradient of the sum of their squares over two replicas with 3 and 4 examples."""

    def on_replica(x: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, variance, _ = global_moments(x, mask if masked else None, [0, 1])
            loss = tf.reduce_sum(mean**2 + variance**2)
        return mean, variance, tape.gradient(loss, x)

    mean, variance, gradient = _on_two(strategy, on_replica, offset, masked)
    return {"mean": mean, "variance": variance, "gradient": [row for part in gradient for row in part]}


def _on_two(strategy: Strategy, on_replica: Any, offset: float, masked: bool) -> list[list[Any]]:
    """What `on_replica` gives for the parts of `moments_data`: [result][replica]."""
    parts = [(part[:3], part[3:]) for part in moments_data(offset, masked=masked)]
    given = [
        strategy.distribution.experimental_distribute_values_from_function(
            lambda context, part=part: tf.constant(part[context.replica_id_in_sync_group])
        )
        for part in parts
    ]
    results = tf.function(lambda *a: strategy.run(on_replica, args=a), autograph=False)(*given)
    return [[v.numpy().tolist() for v in strategy.distribution.experimental_local_results(r)] for r in results]


def differ(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference between two lists of weights."""
    return max(float(np.abs(np.array(a) - np.array(b)).max()) for a, b in zip(ours, theirs, strict=True))
