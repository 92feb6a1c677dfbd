"""Language models: the tokens of a sequence are predicted, each from those before it or from those around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.tasks.supervised import MetricBuilders, Supervised


@keras.saving.register_keras_serializable("tfdist")
class Perplexity(keras.metrics.Mean):
    """e to the mean cross entropy of the tokens, from logits; 1 is a model that is always sure and right.

    Args:
      name: in what is logged.
      dtype: of the sums.
    """

    def __init__(self, name: str = "perplexity", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds tokens, whole numbers [n, length], with logits [n, length, vocabulary]."""
        super().update_state(
            keras.ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True), sample_weight=sample_weight
        )

    def result(self) -> Any:
        """e to the mean."""
        return keras.ops.exp(super().result())


class LanguageModel(Supervised):
    """The model gives logits [n, length, vocabulary] for examples (tokens, targets) or (tokens, targets, weights).

    `token_windows.TokenWindows` gives the first, for a model that predicts the next token and sees those before it
    alone; `drawn.MaskedTokens` the second, for one that sees all. The loss is the mean cross entropy of the tokens that
    weigh something, over the whole global batch.

    Args:
      metrics: as `Supervised` takes them; `Perplexity` is always there.
    """

    def __init__(self, *, metrics: MetricBuilders = ()) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        builders: Sequence[Any] = metrics
        super().__init__(loss=loss, metrics=[Perplexity, *builders] if isinstance(metrics, (list, tuple)) else metrics)
