"""Looks whether metrics are sums over examples, which several replicas add up.

Invariant: a metric that is none gives another result on several replicas than on one device. `--mode=validate` looks
at the first batch, and what runs on several replicas at examples that are made up.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.base import Topology
from tfdist.tasks.base import Task
from tfdist.training.step.gradients import forward
from tfdist.training.step.metrics import ADDED, MetricGroup, result_of

MOST_ROWS = 32
KNOWN_PACKAGES = ("keras", "tfdist")  # whose metrics are such sums


def check_metric_sums(model: keras.Model, task: Task, structure: Any, topology: Topology) -> None:
    """Raises UserError where a metric of the user's own would not be that of one device.

    Args:
      model: built, and not sharded.
      task: bound to it.
      structure: of a batch.
      topology: of the run; one replica reports whatever the metric keeps.
    """
    if topology.num_replicas == 1:
        return
    metrics = MetricGroup(task.metric_specs())
    own = {
        n
        for n, m in zip(metrics.names, metrics.metrics, strict=True)
        if type(m).__module__.partition(".")[0] not in KNOWN_PACKAGES
    }
    if not own:
        return
    try:
        unsummed = metrics_without_sum(model, task, metrics, tf.nest.map_structure(_made_up, structure))
    except Exception:  # what a model or a metric makes of such examples says nothing of those to come
        return
    if wrong := ", ".join(repr(name) for name in unsummed if name in own):
        raise UserError(
            f"The metric {wrong} is not made of sums over examples, so {topology.num_replicas} replicas, which add up "
            "its variables, would report another value than one device. Have update_state add to its variables, and "
            "result combine the sums, or leave it out; add_variable(…, aggregation='mean') gives a mean of replicas."
        )


def _made_up(spec: tf.TensorSpec) -> np.ndarray:
    shape = [MOST_ROWS, *(4 if size is None else size for size in spec.shape[1:])]
    if spec.dtype.is_floating:
        return np.random.default_rng(0).random(shape).astype(spec.dtype.as_numpy_dtype)
    return np.full(shape, b"", object) if spec.dtype == tf.string else np.zeros(shape, spec.dtype.as_numpy_dtype)


def metrics_without_sum(model: keras.Model, task: Task, metrics: MetricGroup, examples: Any) -> list[str]:
    """The names of the metrics whose result is another one where the two halves of a batch are counted apart."""
    count = min(MOST_ROWS, len(tf.nest.flatten(examples)[0])) // 2 * 2  # halves of one length weigh alike
    if not count:
        return []

    batch = tf.nest.map_structure(lambda array: tf.convert_to_tensor(array)[:count], examples)
    with keras.StatelessScope():  # what layers count or draw stays as it is
        whole_outputs = forward(model, task, {"examples": batch}, training=False).outputs

    def states(first: int, last: int) -> list[np.ndarray]:
        part, outputs = (
            tf.nest.map_structure(lambda each: None if each is None else each[first:last], some)
            for some in (batch, whole_outputs)
        )
        metrics.reset()
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
