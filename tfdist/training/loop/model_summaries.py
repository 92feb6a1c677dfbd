"""What TensorBoard shows of the model, where `train.summaries` asks for it: the graph, and how values are spread.

Invariant: it only reads. The chief's `Reporter` calls it at the end of each epoch, before the user's callbacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import keras

from tfdist.strategies.base import Strategy
from tfdist.telemetry.logs.metrics import Metrics
from tfdist.training.step.step import TrainStep

GRAPH, WEIGHTS, GRADIENTS = "graph", "weights", "gradients"
KINDS = (GRAPH, WEIGHTS, GRADIENTS)


class ModelSummaries:
    """The summaries of one training.

    Args:
      wanted: of `KINDS`.
      metrics: where they go.
      strategy: of the training.
      model: whose weights they are.
      step: whose graph it is.
    """

    def __init__(
        self, wanted: Collection[str], *, metrics: Metrics, strategy: Strategy, model: keras.Model, step: TrainStep
    ) -> None:
        self._wanted = wanted
        self._metrics = metrics
        self._strategy = strategy
        self._model = model
        self._step = step
        self._has_graph = False

    def epoch_end(self, step: int, gradients: Mapping[str, Any]) -> None:
        """The weights as they are, and once in a process the graph.

        Args:
          step: that the epoch ended with.
          gradients: histograms of the newest ones, by the names that TensorBoard is to show.
        """
        if GRAPH in self._wanted and not self._has_graph and self._step.graph is not None:
            self._has_graph = True
            self._metrics.log_graph(self._step.graph)
        if WEIGHTS in self._wanted:
            weights = {v.path: self._strategy.first_local(v.value) for v in self._model.weights}
            self._metrics.log_histograms(step=step, values=weights)
        if GRADIENTS in self._wanted and gradients:
            self._metrics.log_histograms(step=step, values=gradients, binned=True)
