"""Learning without targets: two views of an example are to lie closer than views of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.settings.checks import POSITIVE
from tfdist.tasks.task import Task, Term, WholeTerm

VIEWS = ("first", "second")


class Contrastive(Task):
    """NT-Xent, the normalized cross entropy of SimCLR (Chen et al., 2020), over the whole global batch.

    Examples are {"first": x, "second": x}, as `drawn.TwoViews` gives them; the model maps x to an embedding, [n, size].
    Each of the 2n embeddings is to pick its other view among all others by their cosine ÷ temperature. All replicas'
    embeddings meet, with exact gradients, so the loss does not depend on how many replicas there are. The model is
    called once for each view; what layers add to the loss is that of the second.

    Args:
      temperature: above 0.

    Raises:
      UserError: an argument or the data does not fit.
    """

    def __init__(self, *, temperature: float = 0.1) -> None:
        POSITIVE("Contrastive.temperature", temperature)
        self._temperature = float(temperature)

    def inputs(self, examples: Any) -> Any:
        """The first view."""
        return _view(examples, "first")

    def terms(self, model: keras.Model, examples: Any, *, training: bool) -> tuple[dict[str, Term | WholeTerm], Any]:
        """One term of the whole batch, of both views."""
        views = {name: model(_view(examples, name), training=training) for name in VIEWS}
        for view in views.values():
            if not tf.is_tensor(view) or view.shape.rank != 2:
                raise UserError(
                    f"Contrastive takes a model that gives embeddings, [n, size]; it gives {view}. End it with a layer "
                    "such as keras.layers.Dense(64)."
                )
        parts = {name: tf.cast(view, tf.float32) for name, view in views.items()}
        return {"nt_xent": WholeTerm(parts, self._term)}, views

    def _term(self, views: Mapping[str, tf.Tensor]) -> Term:
        """float32 [2n], of each view in the batch."""
        rows = tf.math.l2_normalize(tf.concat([views[name] for name in VIEWS], axis=0), axis=1, epsilon=1e-12)
        count = tf.shape(rows)[0]
        similar = tf.matmul(rows, rows, transpose_b=True) / self._temperature
        similar = tf.where(tf.eye(count, dtype=tf.bool), tf.constant(float("-inf")), similar)
        partner = tf.math.floormod(tf.range(count) + count // 2, count)
        return Term(tf.nn.sparse_softmax_cross_entropy_with_logits(partner, similar))


def _view(examples: Any, name: str) -> Any:
    if not isinstance(examples, Mapping) or name not in examples:
        raise UserError(
            'Contrastive learns from examples {"first": x, "second": x}; the data gives something else. Write '
            "@drawn.TwoViews around the data function."
        )
    return examples[name]
