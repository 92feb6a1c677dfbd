"""A classifier of texts by the mean of their words' embeddings, as fastText (https://arxiv.org/abs/1607.01759)."""

from __future__ import annotations

import keras


def build_text_classifier(
    *, vocabulary_size: int, num_classes: int, width: int = 64, hidden_units: int = 64, dropout: float = 0.2
) -> keras.Model:
    """An embedding, the mean over the words, a hidden layer, logits. Padding, id 0, counts for nothing.

    Args:
      vocabulary_size: ids that occur, 0 … vocabulary_size - 1.
      num_classes: the length of the output.
      width: of an embedding.
      hidden_units: the width of the hidden layer.
      dropout: the share of the hidden layer's inputs and outputs left out in training.

    Returns:
      An uncompiled model from int32 ids [n, any length] to logits [n, num_classes].
    """
    ids = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(vocabulary_size, width)(ids)
    is_word = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(ids, 0), embedded.dtype), -1)
    # At least one: of a line of signs alone nothing is left.
    num_words = keras.ops.maximum(keras.ops.sum(is_word, axis=1), 1)
    x = keras.ops.sum(embedded * is_word, axis=1) / num_words
    x = keras.layers.Dropout(dropout)(x)
    x = keras.layers.Dense(hidden_units, activation="relu")(x)
    x = keras.layers.Dropout(dropout)(x)
    return keras.Model(ids, keras.layers.Dense(num_classes, dtype="float32", name="output")(x), name="text_classifier")
