"""Training on examples that were changed against the model (Goodfellow et al., 2015; Madry et al., 2018)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.settings.checks import COUNT, POSITIVE, Check, number
from tfdist.tasks.supervised import Supervised
from tfdist.tasks.task import MetricSpec, Term, WholeTerm, scale_term

PREFIX = "adversarial"
BOUNDS = Check(
    "(lowest, highest), such as (0.0, 1.0)",
    lambda value: isinstance(value, tuple | list) and len(value) == 2 and value[0] < value[1],
    takes_none=True,
)


class Adversarial(Supervised):
    """Half of the loss, or another share, is that of inputs which were moved to where the loss is higher.

    One step of the size of `epsilon` is the fast gradient sign method; several are projected gradient descent, which
    begins at the example itself. The changed inputs are sought on the model as it evaluates, without dropout, one
    example apart from the others. Losses and metrics of the changed examples are logged beside the others, with
    "adversarial_" before their names, of evaluations too.

    Args:
      epsilon: the most by which a number of the inputs changes.
      steps: of the search, a gradient each; one goes as far as `epsilon`, each of several 2.5 · epsilon ÷ steps.
      share: of the changed examples in the loss, 0 … 1.
      bounds: (lowest, highest) value of an input; None for any.
      **supervised: loss, metrics, loss_weights and class_weight as `Supervised` takes them.

    Raises:
      UserError: an argument is something else.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        steps: int = 1,
        share: float = 0.5,
        bounds: tuple[float, float] | None = None,
        **supervised: Any,
    ) -> None:
        super().__init__(**supervised)
        POSITIVE("Adversarial.epsilon", epsilon)
        COUNT("Adversarial.steps", steps)
        number(0, 1)("Adversarial.share", share)
        BOUNDS("Adversarial.bounds", bounds)
        self._epsilon, self._steps, self._share, self._bounds = float(epsilon), steps, float(share), bounds
        self._step_size = epsilon if steps == 1 else 2.5 * epsilon / steps

    def bind(self, model: keras.Model, structure: Any) -> None:
        """Refuses inputs that cannot be moved along a gradient."""
        super().bind(model, structure)
        wrong = [s for s in tf.nest.flatten(self.inputs(structure)) if not s.dtype.is_floating]
        if wrong:
            raise UserError(
                "Adversarial changes inputs of floats, by the gradient of Supervised.loss; received inputs of "
                f"{wrong[0].dtype.name}."
            )

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        """Computes the loss terms, and the outputs, of clean and of adversarial examples."""
        clean, seen = super().terms(model, examples, training=training)
        x, *rest = examples
        changed, seen_there = super().terms(model, (self._attack(model, x, rest), *rest), training=training)
        terms = {name: scale_term(term, 1 - self._share) for name, term in clean.items()}
        terms |= {f"{PREFIX}_{name}": scale_term(term, self._share) for name, term in changed.items()}
        return terms, (seen, seen_there)

    def _attack(self, model: keras.Model, x: Any, rest: Sequence[Any]) -> Any:
        """The inputs where the loss is higher; constants to whoever differentiates."""
        start = tf.nest.map_structure(tf.stop_gradient, x)
        here = start
        for _ in range(self._steps):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(tf.nest.flatten(here))
                terms, _ = super().terms(model, (here, *rest), training=False)
                loss = tf.add_n([_sum_term(name, term) for name, term in terms.items()])
            gradients = tape.gradient(loss, tf.nest.flatten(here), unconnected_gradients="zero")
            moved = [
                self._take_step(now, begin, gradient)
                for now, begin, gradient in zip(tf.nest.flatten(here), tf.nest.flatten(start), gradients, strict=True)
            ]
            here = tf.nest.pack_sequence_as(x, moved)
        return tf.nest.map_structure(tf.stop_gradient, here)

    def _take_step(self, now: tf.Tensor, begin: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        moved = now + tf.cast(self._step_size, now.dtype) * tf.sign(gradient)
        moved = tf.clip_by_value(moved, begin - self._epsilon, begin + self._epsilon)
        return moved if self._bounds is None else tf.clip_by_value(moved, *self._bounds)

    def term_names(self) -> Sequence[str]:
        return *self._names, *(f"{PREFIX}_{name}" for name in self._names)

    def metric_specs(self) -> Sequence[MetricSpec]:
        specs = super().metric_specs()
        both = [dataclasses.replace(s, output=f"{PREFIX}_{s.output}" if s.output else PREFIX) for s in specs]
        return [*specs, *both]

    def compile_arguments(self, metrics: Sequence[keras.metrics.Metric]) -> dict[str, Any]:
        return super().compile_arguments(metrics[: len(metrics) // 2])

    def update_metrics(self, metrics: Sequence[keras.metrics.Metric], examples: Any, outputs: Any, shares: Any) -> None:
        """Updates the first half with the examples, the second with the changed ones."""
        half = len(metrics) // 2
        super().update_metrics(metrics[:half], examples, outputs[0], shares)
        super().update_metrics(metrics[half:], examples, outputs[1], shares)


def _sum_term(name: str, term: Term | WholeTerm) -> tf.Tensor:
    """A number that rises with the loss of each example, however it is weighed."""
    if isinstance(term, WholeTerm):
        raise UserError(
            f"Adversarial changes each example by itself, and the loss {name!r} is one of the whole batch. Write one "
            "that gives one number for each example."
        )
    return term.coefficient * tf.reduce_sum(term.values)
