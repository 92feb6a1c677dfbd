"""Several outputs whose losses weigh what the training itself learns."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.tasks.supervised import Supervised
from tfdist.tasks.task import Term, WholeTerm, scale_term

PRIOR = "log_variances"


class LogVariances(keras.layers.Layer):
    """Holds s = log σ² of each output, float32 [outputs], which begin at 0.

    Args:
      count: outputs.
    """

    def __init__(self, count: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.values = self.add_weight(shape=(count,), initializer="zeros", name="values", dtype="float32")
        self.built = True


class UncertaintyWeighted(Supervised):
    """Losses of several outputs, each weighed by its learned variance σ² (Kendall, Gal and Cipolla, 2018).

    The loss is Σ c · exp(-s) · loss + s ÷ 2 with s = log σ², where c is 1 ÷ 2 for a squared error and 1 for others.
    The s are variables of the training, part of its checkpoints; the exported model is without them. Weights that stay
    are `Supervised.loss_weights`; given here, they multiply c.

    Args:
      **supervised: as `Supervised` takes them; the loss is a dict by output name.

    Raises:
      UserError: there are no several outputs.
    """

    def __init__(self, **supervised: Any) -> None:
        super().__init__(**supervised)
        if self._single:
            raise UserError(
                "UncertaintyWeighted.loss is a dict of losses by output name; for one output use Supervised."
            )

    def bind(self, model: keras.Model, structure: Any) -> None:
        """Adds a trainable log variance per output to the model."""
        super().bind(model, structure)
        setattr(model, PRIOR, LogVariances(len(self._losses), name=PRIOR))

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        """The weighed losses, and the penalty on the weights."""
        given, seen = super().terms(model, examples, training=training)
        logs = tf.convert_to_tensor(getattr(model, PRIOR).values)
        terms: dict[str, Term | WholeTerm] = {}
        for index, (name, term) in enumerate(given.items()):
            is_squared = getattr(self._losses[name], "fn", None) is keras.losses.mean_squared_error
            terms[name] = scale_term(term, (0.5 if is_squared else 1.0) * tf.exp(-logs[index]))
        rows = tf.shape(tf.nest.flatten(examples)[0])[:1]
        terms[PRIOR] = Term(tf.broadcast_to(0.5 * tf.reduce_sum(logs), rows), reduction="sum_over_batch_size")
        return terms, seen
