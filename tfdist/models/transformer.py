"""A small transformer over tokens: a language model of either kind."""

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
    """Blocks of self-attention and two dense layers, each after a normalization and beside a shortcut.

    Args:
      vocabulary_size: tokens are 0 … vocabulary_size - 1.
      length: tokens of a sequence.
      width: of the vectors between the blocks.
      num_layers: blocks.
      num_heads: of the attention; they share the width.
      causal: whether a place sees the places before it alone.
      dropout: the share left out in training, of attention and of each block's outputs.

    Returns:
      An uncompiled model from int32 [n, length] to logits float32 [n, length, vocabulary_size].
    """
    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary_size, width, name="tokens")(inputs)
    x = Places(name="places")(x)
    for index in range(num_layers):
        x = _block(x, f"block_{index}", width, num_heads, causal=causal, dropout=dropout)
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    logits = keras.layers.Dense(vocabulary_size, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="transformer")


def _block(x: Any, name: str, width: int, num_heads: int, *, causal: bool, dropout: float) -> Any:
    here = keras.layers.LayerNormalization(name=f"{name}_attention_norm")(x)
    attention = keras.layers.MultiHeadAttention(
        num_heads, width // num_heads, dropout=dropout, name=f"{name}_attention"
    )
    x = x + keras.layers.Dropout(dropout)(attention(here, here, use_causal_mask=causal))
    here = keras.layers.LayerNormalization(name=f"{name}_norm")(x)
    here = keras.layers.Dense(4 * width, activation="gelu", name=f"{name}_wide")(here)
    here = keras.layers.Dense(width, name=f"{name}_narrow")(here)
    return x + keras.layers.Dropout(dropout)(here)


@keras.saving.register_keras_serializable("tfdist")
class Places(keras.layers.Layer):
    """Adds a learned vector for each place of a sequence, [n, length, width]."""

    def build(self, input_shape: Any) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="vectors")

    def call(self, inputs: Any) -> Any:
        return inputs + self.vectors
