"""Small models of KerasHub, built from their configurations, with their preprocessors outside and inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np

RNG = np.random.default_rng(3)
TEXTS = np.array([" ".join(RNG.choice(["the", "cat", "dog", "sat", "ran", "far"], 5)) for _ in range(24)])
LABELS = np.array([int("cat" in text) for text in TEXTS])
IMAGES = RNG.integers(0, 256, (24, 32, 32, 3)).astype(np.float32)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "far"]
SIZES = {
    "vocabulary_size": len(WORDS),
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "max_sequence_length": 8,
    "dropout": 0.0,
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build_text_classifier() -> keras.Model:
    keras.utils.set_random_seed(2)
    tokenizer = keras_hub.models.BertTokenizer(WORDS)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    backbone = keras_hub.models.BertBackbone(**SIZES)
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)
    return compiled(model)


def build_language_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    backbone = keras_hub.models.GPT2Backbone(**SIZES)
    backbone.enable_lora(2)
    return compiled(keras_hub.models.GPT2CausalLM(backbone, preprocessor=None))


def build_image_classifier() -> keras.Model:
    keras.utils.set_random_seed(2)
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(32, 32, 3),
    )
    converter = keras_hub.layers.ImageConverter(image_size=(32, 32), scale=1 / 255)
    preprocessor = keras_hub.models.ImageClassifierPreprocessor(converter)
    return compiled(keras_hub.models.ImageClassifier(backbone, num_classes=2, preprocessor=preprocessor))


def compiled(model: keras.Model) -> keras.Model:
    # Of an embedding tfdist adds up the gradients of a row that repeats, which matters to optimizers such as Adam.
    model.compile(keras.optimizers.SGD(0.003, momentum=0.9), LOSS, weighted_metrics=["accuracy"])
    return model


def load_tokens() -> tuple[Any, Any]:
    tokens = RNG.integers(5, len(WORDS), (24, 9))
    mask = np.ones((24, 8), bool)
    return {"token_ids": tokens[:, :-1], "padding_mask": mask}, tokens[:, 1:]


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[Any, Any]]] = {
    "BERT, its preprocessor within": (build_text_classifier, (TEXTS, LABELS)),
    "GPT-2 with LoRA": (build_language_model, load_tokens()),
    "ResNet, its preprocessor within": (build_image_classifier, (IMAGES, LABELS)),
}
