"""Looks whether metrics are sums over examples, which several replicas add up.

Invariant: a metric that is none gives another result on several replicas than on one device. Called by
`--mode=validate` on the first batch, in one process.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.tasks.base import Task
from tfdist.training.step.gradients import forward
from tfdist.training.step.metrics import ADDED, MetricGroup, result_of

MOST_ROWS = 32


def metrics_without_sum(model: keras.Model, task: Task, metrics: MetricGroup, examples: Any) -> list[str]:
    """The names of the metrics whose result is another one where the two halves of a batch are counted apart."""
    count = min(MOST_ROWS, len(tf.nest.flatten(examples)[0]))

    def states(first: int, last: int) -> list[np.ndarray]:
        part = tf.nest.map_structure(lambda array: tf.convert_to_tensor(array)[first:last], examples)
        metrics.reset()
        outputs = forward(model, task, {"examples": part}, training=False).outputs
        task.update_metrics(metrics.metrics, part, outputs, None)
        return [np.array(variable.value) for variable in metrics.variables]

    whole, *halves = states(0, count), states(0, count // 2), states(count // 2, count)
    metrics.reset()
    names, at = [], 0
    for name, metric in zip(metrics.names, metrics.metrics, strict=True):
        places = range(at, at := at + len(metric.variables))
        added = [
            halves[0][i] + halves[1][i] if variable.aggregation == ADDED else whole[i]
            for i, variable in zip(places, metric.variables, strict=True)
        ]
        alike = [whole[i] for i in places]
        results = [result_of(metric, [tf.constant(each) for each in some]) for some in (alike, added)]
        one, other = (np.concatenate([np.ravel(each) for each in tf.nest.flatten(result)]) for result in results)
        if not np.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True):
            names.append(name)
    return names
