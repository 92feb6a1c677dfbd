"""Several objectives, each of a part of the model, updated in turn: what most own `train_step`s are for.

Invariant: a step takes all turns on one global batch, in their order, each from the weights that the one before it has
left. Every turn's loss is reduced over the global batch as any task's is, so nothing depends on the number of replicas.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.tasks.base import MetricSpec, Task, Term, WholeTerm


@dataclasses.dataclass(frozen=True)
class Turn:
    """One of the updates of a step.

    Attributes:
      name: of the objective.
      layers: names of the model's layers (models are layers, too) whose variables are updated.
      index: of this update among those of the step, from 0.
    """

    name: str
    layers: Sequence[str]
    index: int = 0


class InTurns(Task):
    """Subclass it for a training of several objectives.

    Terms of different turns have different names. Give each part an optimizer by `keras.optimizers.MultiOptimizer`
    where one for both will not do.
    """

    def variables_of(self, turn: Turn, model: keras.Model) -> list[keras.Variable]:
        """The trainable variables that a turn updates, in the model's order."""
        own = {id(v) for name in turn.layers for v in model.get_layer(name).trainable_variables}
        return [v for v in model.trainable_variables if id(v) in own]

    @property
    @abc.abstractmethod
    def turns(self) -> Sequence[Turn]:
        """The updates of a step, in order; a turn that comes k times stands there k times, with indices of its own."""

    @abc.abstractmethod
    def terms_of(
        self, turn: Turn, model: keras.Model, examples: Any, *, training: bool
    ) -> tuple[dict[str, Term | WholeTerm], Any]:
        """The loss terms of a turn by name, and the outputs that `update_metrics` wants, as in `Task.terms`."""

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        """Those of every objective, once each, for an evaluation."""
        terms: dict[str, Term | WholeTerm] = {}
        outputs: Any = None
        for turn in {turn.name: turn for turn in self.turns}.values():
            found, outputs = self.terms_of(turn, model, examples, training=training)
            terms |= found
        return terms, outputs


class OneTurn(Task):
    """A task of one turn alone, as the step computes it.

    Args:
      task: of several.
      turn: which.
    """

    def __init__(self, task: InTurns, turn: Turn) -> None:
        self._task = task
        self._turn = turn

    def inputs(self, examples: Any) -> Any:
        return self._task.inputs(examples)

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        return self._task.terms_of(self._turn, model, examples, training=training)

    def metric_specs(self) -> Sequence[MetricSpec]:
        return self._task.metric_specs()

    def update_metrics(self, metrics: Sequence[keras.metrics.Metric], examples: Any, outputs: Any, shares: Any) -> None:
        self._task.update_metrics(metrics, examples, outputs, shares)
