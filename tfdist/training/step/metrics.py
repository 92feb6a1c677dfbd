"""Keras metrics whose state lives apart on each replica and is summed when it is read.

Invariant: a metric's state over the run is the sum over replicas of what each added, so its result is that of one
device that saw every example once. Read once a call of the step function, in the same call.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.strategy import Strategy, replica_index
from tfdist.tasks.task import MetricSpec

ADDED = "sum"  # the aggregation of a variable, by default


class MetricGroup:
    """The metrics of one split. Make it inside the strategy's scope.

    Args:
      specs: what to build. Some metrics make their variables when they first see outputs; `learner.build_model` shows
        them some.
      names: what to call them in what is logged; None takes Keras's names, of which repeats are numbered (auc, auc_1).

    Raises:
      UserError: one builds no metric, or is called "loss".
    """

    def __init__(self, specs: Sequence[MetricSpec], names: Sequence[str] | None = None) -> None:
        self.metrics = [_build_metric(spec) for spec in specs]
        self.names = list(names) if names else _names(specs, self.metrics)
        if "loss" in self.names:
            raise UserError(
                "A metric is called 'loss', as the loss is. Give it a name of its own: write a function that returns "
                "keras.metrics.…(name='another_name')."
            )

    def reported_names(self) -> dict[str, int] | None:
        """The names of the results of `read`, and the number of values of each.

        None where a metric of the user's own does not tell before it counts.
        """
        names: dict[str, int] = {}
        for name, metric in zip(self.names, self.metrics, strict=True):
            try:
                result = metric.result()
            except Exception:  # whatever a metric that has seen nothing may do
                return None
            results = result if isinstance(result, dict) else {name: result}
            names |= {each: math.prod(getattr(value, "shape", ())) for each, value in results.items()}
        return names

    def reset(self) -> None:
        """Back to no example seen; in replica context."""
        for metric in self.metrics:
            metric.reset_state()

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics, in their order."""
        return [v for metric in self.metrics for v in metric.variables]

    def read(
        self, strategy: Strategy, beside: Sequence[tf.Tensor] = ()
    ) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        """The metrics over all replicas, and the sums of `beside`; in replica context, one reduction."""
        summed, count = self.states(strategy, beside), len(self.variables)
        return self.results_of(dict(zip(map(id, self.variables), summed[:count], strict=True))), summed[count:]

    def results_of(self, states: Mapping[int, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The results by name if the variables, known by id, had these values."""
        results: dict[str, tf.Tensor] = {}
        for name, metric in zip(self.names, self.metrics, strict=True):
            result = result_of(metric, [states[id(variable)] for variable in metric.variables])
            results.update(result if isinstance(result, dict) else {name: result})
        return results

    def states(self, strategy: Strategy, beside: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        """The values of `variables` over all replicas, then the sums of `beside`; in replica context."""
        parts = [*(self._contribution(v, strategy) for v in self.variables), *beside]
        return strategy.sum_over_replicas(parts) if parts else []

    def load(self, strategy: Strategy, states: Sequence[tf.Tensor]) -> None:
        """Continues from `states`, as `states` gave them on whatever replicas; in replica context.

        What is summed over the replicas goes to the first one of the run, and the others begin with nothing.
        """
        is_first = tf.equal(replica_index(), 0)
        for variable, state in zip(self.variables, states, strict=True):
            is_summed = variable.aggregation == ADDED and strategy.topology.num_replicas > 1
            variable.assign(tf.where(is_first, state, tf.zeros_like(state)) if is_summed else state)

    def _contribution(self, variable: Any, strategy: Strategy) -> tf.Tensor:
        """What this replica adds to the variable's value over all replicas."""
        value = tf.convert_to_tensor(variable.value)
        if variable.aggregation == ADDED or strategy.topology.num_replicas == 1:
            return value
        if variable.aggregation == "mean":
            return value / tf.cast(strategy.topology.num_replicas, value.dtype)
        return tf.where(tf.equal(replica_index(), 0), value, tf.zeros_like(value))


def result_of(metric: keras.metrics.Metric, states: Sequence[tf.Tensor]) -> Any:
    """The metric's result if its variables had these values: a tensor, or a dict of them.

    A result that is a variable is read here: `Metric.stateless_result` would hand out the variable, with the value that
    it has on this replica.
    """
    with keras.StatelessScope(state_mapping=list(zip(metric.variables, states, strict=True))):
        return tf.nest.map_structure(
            lambda r: tf.identity(r.value) if isinstance(r, keras.Variable) else r, metric.result()
        )


def _build_metric(spec: MetricSpec) -> keras.metrics.Metric:
    try:
        metric = spec.build()
    except TypeError as error:
        raise UserError(
            f"The metric {_name(spec.build)} cannot be built without arguments: {error}. Write a function that returns "
            "the metric; to average a function of (y_true, y_pred), one that returns "
            "keras.metrics.MeanMetricWrapper(the_function)."
        ) from error
    if not isinstance(metric, keras.metrics.Metric):
        raise UserError(f"The metric {_name(spec.build)} gives a {type(metric).__name__}, not a keras.metrics.Metric.")
    return metric


def _names(specs: Sequence[MetricSpec], metrics: Sequence[keras.metrics.Metric]) -> list[str]:
    """Returns the metrics' names, with numbers that begin anew; Keras counts on through all that a process builds."""
    names: list[str] = []
    for spec, metric in zip(specs, metrics, strict=True):
        prefix = f"{spec.output}_" if spec.output else ""
        plain = re.sub(r"_\d+$", "", metric.name)
        is_named = plain == metric.name or spec.build().name == metric.name  # by its class, or the user
        name = metric.name if is_named else plain
        again = f"{prefix}{spec.repeat_prefix}{name}"
        numbered = (f"{again}_{i}" for i in itertools.count(1))
        names.append(next(each for each in itertools.chain([prefix + name, again], numbered) if each not in names))
    return names


def _name(builder: Any) -> str:
    return getattr(builder, "__name__", repr(builder))
