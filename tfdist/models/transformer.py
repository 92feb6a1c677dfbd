"""Small transformers over tokens: a language model of either kind, and a classifier of texts."""

from __future__ import annotations

from typing import Any

import keras


def build_transformer(
    *,
    vocabulary_size: int,
    length: int,
    width: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    causal: bool = True,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds a transformer language model: blocks named block_0, block_1, …; logits of each position's token.

    Args:
      vocabulary_size: tokens are 0 … vocabulary_size - 1.
      length: tokens of a sequence.
      width: of the vectors between the blocks.
      num_layers: blocks.
      num_heads: of the attention; they share the width.
      causal: whether a position sees those before it alone.
      dropout: the share left out in training, of attention and of each block's outputs.

    Returns:
      An uncompiled model from int32 [n, length] to logits float32 [n, length, vocabulary_size].
    """
    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary_size, width, name="tokens")(inputs)
    x = PositionEmbedding(name="places")(x)
    for index in range(num_layers):
        x = TransformerBlock(num_heads, causal=causal, dropout=dropout, name=f"block_{index}")(x)
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    logits = keras.layers.Dense(vocabulary_size, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="transformer")


def build_transformer_classifier(
    *,
    vocabulary_size: int,
    length: int,
    num_classes: int,
    width: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds a text classifier: transformer encoder, mean over the tokens but the padding, logits. Token 0 is padding.

    Args:
      vocabulary_size: tokens are 0 … vocabulary_size - 1.
      length: tokens of a text, padded.
      num_classes: the length of the output.
      width: of the vectors between the blocks.
      num_layers: blocks.
      num_heads: of the attention; they share the width.
      dropout: the share left out in training, of attention and of each block's outputs.

    Returns:
      An uncompiled model from int32 [n, length] to logits float32 [n, num_classes].
    """
    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary_size, width, mask_zero=True, name="tokens")(inputs)
    x = PositionEmbedding(name="places")(x)
    for index in range(num_layers):
        x = TransformerBlock(num_heads, causal=False, dropout=dropout, name=f"block_{index}")(x)
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    is_token = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(inputs, 0), x.dtype), -1)
    # At least one: of a text of signs alone nothing is left.
    x = keras.ops.sum(x * is_token, axis=1) / keras.ops.maximum(keras.ops.sum(is_token, axis=1), 1)
    logits = keras.layers.Dense(num_classes, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="encoder")


@keras.saving.register_keras_serializable("tfdist", name="Places")
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector for each position of a sequence, [n, length, width]."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="vectors")

    def call(self, inputs: Any) -> Any:
        return inputs + self.vectors


PositionEmbedding.__name__ = "Places"  # in files of models, by which Keras finds the layer and its weights


@keras.saving.register_keras_serializable("tfdist")
class TransformerBlock(keras.layers.Layer):
    """Self-attention and two dense layers, each after a normalization and beside a shortcut, [n, length, width].

    Args:
      num_heads: of the attention; they share the width.
      causal: whether a position sees those before it alone.
      dropout: the share left out in training, of attention and of what the shortcuts are added to.
    """

    def __init__(self, num_heads: int, *, causal: bool, dropout: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.supports_masking = True
        self._settings = {"num_heads": num_heads, "causal": causal, "dropout": dropout}
        self.attention_norm = keras.layers.LayerNormalization(dtype=self.dtype_policy)
        self.norm = keras.layers.LayerNormalization(dtype=self.dtype_policy)
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, input_shape: Any) -> None:
        width, heads = input_shape[-1], self._settings["num_heads"]
        own = {"dtype": self.dtype_policy}
        self.attention = keras.layers.MultiHeadAttention(
            heads, width // heads, dropout=self._settings["dropout"], name="attention", **own
        )
        self.wide = keras.layers.Dense(4 * width, activation="gelu", name="wide", **own)
        self.narrow = keras.layers.Dense(width, name="narrow", **own)
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.norm.build(input_shape)
        self.wide.build(input_shape)
        self.narrow.build((*input_shape[:-1], 4 * width))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        here = self.attention_norm(inputs)
        attended = self.attention(here, here, use_causal_mask=self._settings["causal"], training=training)
        x = inputs + self.dropout(attended, training=training)
        here = self.narrow(self.wide(self.norm(x)))
        return x + self.dropout(here, training=training)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | self._settings
