"""A language model of KerasHub, its tokenizer and its texts: nothing is downloaded.

For trained weights write `keras_hub.models.GPT2Backbone.from_preset("gpt2_base_en")`, and its tokenizer.
"""

import functools
import pydoc_data.topics

import keras
import keras_hub
import numpy as np
import sklearn.datasets
import tensorflow as tf

VOCABULARY_SIZE = 1000


def read_manual():
    """The reference of Python, from which its help() answers."""
    return list(pydoc_data.topics.topics.values())


def read_descriptions():
    """The descriptions of the data sets of scikit-learn."""
    names = ("iris", "wine", "diabetes", "breast_cancer", "linnerud", "digits")
    return [getattr(sklearn.datasets, f"load_{name}")().DESCR for name in names]


@functools.cache
def train_tokenizer():
    """A WordPiece tokenizer, trained on the manual."""
    words = keras_hub.tokenizers.compute_word_piece_vocabulary(
        tf.data.Dataset.from_tensor_slices(read_manual()), VOCABULARY_SIZE, reserved_tokens=["[PAD]", "[UNK]"]
    )
    return keras_hub.tokenizers.WordPieceTokenizer(words, lowercase=True)


def load_tokens(*, texts, split):
    """The texts in one row of tokens, int32 [m]: of which the last fifth is for testing."""
    tokens = np.concatenate([np.asarray(train_tokenizer()(text)) for text in texts()])
    cut = len(tokens) * 4 // 5
    return tokens[cut:] if split == "test" else tokens[:cut]


def build_model(*, num_layers=2, num_heads=4, hidden_dim=128, length=64):
    """GPT-2 in small: from tokens [n, length] to logits of the next ones [n, length, VOCABULARY_SIZE]."""
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY_SIZE,
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
        intermediate_dim=4 * hidden_dim,
        dropout=0.0,
        max_sequence_length=length,
    )
    tokens = keras.Input((length,), dtype="int32")
    hidden = backbone({"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)})
    return keras.Model(tokens, backbone.token_embedding(hidden, reverse=True))
