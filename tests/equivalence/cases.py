"""The trainings that every strategy must do alike, and a program that does them all under one strategy.

    PYTHONPATH=.:tests python -m equivalence.cases STRATEGY DIRECTORY [CASE …]

STRATEGY: one_device, mirrored2, mirrored4, mirrored_gpus, padded2, multi_worker (with TF_CONFIG), horovod (under
horovodrun). Each case is a run of `experiment.train`, from data to export/model.keras, in DIRECTORY/CASE. Models are
smooth (tanh, no pooling), so that the last bit of a sum does not decide which way a unit goes and differences stay as
small as they begin.
"""

from __future__ import annotations

import atexit
import functools
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.data.sources.sklearn_sets import load_digits
from tfdist.data.text.token_windows import TokenWindows
from tfdist.data.transforms import drawn, mixing
from tfdist.experiment import train
from tfdist.models.transformer import TransformerBlock
from tfdist.recipes import schedules
from tfdist.recipes.groups import Group, Grouped, LayerwiseDecay
from tfdist.recipes.lora import adapted
from tfdist.recipes.optimizers import Lars
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.pipelined import Pipelined
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.adversarial import Adversarial
from tfdist.tasks.contrastive import Contrastive
from tfdist.tasks.distillation import Distillation
from tfdist.tasks.language import LanguageModel
from tfdist.tasks.multi_task import UncertaintyWeighted
from tfdist.tasks.supervised import Supervised
from tfdist.training.recovery.rollback import Rollback
from tfdist.training.run.eval_sets import EvalSet
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings


class PaddedMirrored(Mirrored):
    """Two replicas fed as a TPU is: batches of one shape, the missing examples padded with some that do not count."""

    needs_static_shapes = True


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one_device": OneDevice,
    "mirrored2": lambda: Mirrored(num_cpu_devices=2),
    **{f"mirrored{n}": functools.partial(Mirrored, num_cpu_devices=n) for n in (3, 4, 5, 6)},
    "mirrored_gpus": Mirrored,
    "padded2": lambda: PaddedMirrored(num_cpu_devices=2),
    "multi_worker": functools.partial(MultiWorker, bytes_per_pack=2000),  # several packs a step
    "horovod": Horovod,
    "pipelined2": lambda: Pipelined(["second"], num_cpu_devices=2),
    "pipelined3": lambda: Pipelined(["normalized", "second"], num_cpu_devices=3),
}


all_digits = functools.cache(lambda: load_digits(split="all"))


def digits(num_examples: int = 448) -> tuple[np.ndarray, np.ndarray]:
    images, labels = all_digits()
    return images[:num_examples].reshape(num_examples, 64).copy(), labels[:num_examples].copy()


def linear_model() -> keras.Model:
    inputs = keras.Input((64,))
    return keras.Model(inputs, keras.layers.Dense(10)(inputs))


def diverging_sgd() -> keras.optimizers.Optimizer:
    """From the seventh step on so fast that the weights of a squared error leave float32 within a few."""
    return keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.01, 1e12]))


def overflowing_digits() -> tuple[np.ndarray, np.ndarray]:
    """Three batches, the last example of the second one too large for float16."""
    images, labels = digits(192)
    good_images, good_labels = digits(128)
    images = np.concatenate([good_images[:64], images[128:], good_images[64:]])
    labels = np.concatenate([good_labels[:64], labels[128:], good_labels[64:]])
    images[127] = 1e5
    return images, labels


def weighted_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images, labels = digits()
    return images, labels, np.random.default_rng(1).uniform(0.0, 3.0, len(labels)).astype(np.float32)


def with_weightless_batch(batches: tuple[int, ...] = (0, 1, 2)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Some of three batches of 64: the second one weighs nothing, of the first one its second half alone does."""
    images, labels, weights = weighted_digits()
    weights[:32] = weights[64:128] = 0.0
    rows = np.concatenate([np.arange(64 * i, 64 * (i + 1)) for i in batches])
    return images[rows], labels[rows], weights[rows]


def words(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Each digit's eight brightest pixels as eight words; some words come up often in one batch."""
    images, labels = digits()
    return (np.argsort(images, axis=1)[:, -8:] * (vocabulary // 64)).astype(np.int32), labels


def two_outputs() -> tuple[Any, Any, Any]:
    """Two inputs, two outputs, each output with weights of its own."""
    images, labels = digits()
    weights = np.random.default_rng(2).uniform(0.5, 2.0, (2, len(labels))).astype(np.float32)
    return (
        {"upper": images[:, :32], "lower": images[:, 32:]},
        {"digit": labels, "odd": (labels % 2).astype(np.float32)[:, np.newaxis]},
        {"digit": weights[0], "odd": weights[1]},
    )


def dense_model(*, batch_norm: bool = False, regularizer: Any = None) -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dense(32, use_bias=not batch_norm, kernel_regularizer=regularizer)(inputs)
    if batch_norm:
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.Activation("tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def convnet_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Reshape((8, 8, 1))(inputs)
    x = keras.layers.Conv2D(8, 3, use_bias=False)(x)
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.Activation("tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def deep_convnet_model(dropout: float = 0.2) -> keras.Model:
    """Batch normalization after batch normalization, and losses that depend on weights and on examples."""
    inputs = keras.Input((64,))
    x = keras.layers.Reshape((8, 8, 1))(inputs)
    for filters in (8, 16):
        x = keras.layers.Conv2D(filters, 3, use_bias=False, kernel_regularizer="l2")(x)
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
        x = keras.layers.Dropout(dropout)(keras.layers.Activation("relu")(x))
    x = AddsLoss()(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def padded_words() -> tuple[np.ndarray, np.ndarray]:
    """Words of which the last ones, from none to five, are padding."""
    inputs, labels = words(64)
    kept = np.arange(8) < (8 - labels[:, np.newaxis] % 6)
    return np.where(kept, inputs + 1, 0), labels


def masked_batch_norm_model() -> keras.Model:
    """Batch normalization that leaves out padding, and around each place's own statistics; far from zero."""
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(65, 16, mask_zero=True, embeddings_initializer="glorot_normal")(inputs)
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.TimeDistributed(keras.layers.BatchNormalization(momentum=0.9))(x)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Activation("tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def embedding_model(vocabulary: int) -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(vocabulary, 16)(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


@keras.saving.register_keras_serializable("tfdist_tests")
class AddsLoss(keras.layers.Layer):
    """Adds the mean square of its inputs to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        return inputs


def adding_model() -> keras.Model:
    """Losses that are means over examples, beside a regularizer of weights."""
    inputs = keras.Input((64,))
    x = keras.layers.Dense(32, "tanh", kernel_regularizer="l2", activity_regularizer="l2")(inputs)
    return keras.Model(inputs, keras.layers.Dense(10, activity_regularizer="l1")(AddsLoss()(x)))


def weighted_in_part() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights that are small in a batch's first half; the last batch has five examples."""
    images, labels = digits(453)
    rises = np.arange(453) % 64 / 32
    return images, labels, (rises**2).astype(np.float32)


@keras.saving.register_keras_serializable("tfdist_tests")
class Counts(keras.layers.Layer):
    """Counts examples and keeps other values of a batch, each variable with an aggregation of its own."""

    def build(self, input_shape: Any) -> None:
        def count(name: str, aggregation: str) -> Any:
            return self.add_weight(
                name=name, shape=(), initializer="zeros", trainable=False, aggregation=aggregation, autocast=False
            )

        self.seen = count("seen", "sum")  # examples in all
        self.size = count("size", "sum")  # examples of the last batch
        self.left = count("left", "sum")  # less the examples
        self.share = count("share", "mean")  # examples a replica in all
        self.steps = count("steps", "only_first_replica")
        self.first = count("first", "only_first_replica")  # the first replica's share of the last batch
        self.largest = count("largest", "none")  # each replica's own

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            rows = keras.ops.cast(keras.ops.shape(inputs)[0], "float32")
            self.seen.assign_add(rows)
            self.size.assign(rows)
            self.left.assign_sub(rows)
            self.share.assign_add(rows)
            self.steps.assign_add(1.0)
            self.first.assign(rows)
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(keras.ops.sum(inputs, axis=1))))
        return inputs


def counting_model() -> keras.Model:
    inputs = keras.Input((64,))
    return keras.Model(inputs, keras.layers.Dense(10)(Counts()(inputs)))


def two_output_model() -> keras.Model:
    upper, lower = keras.Input((32,), name="upper"), keras.Input((32,), name="lower")
    x = keras.layers.Dense(24, activation="tanh")(keras.layers.Concatenate()([upper, lower]))
    digit, odd = keras.layers.Dense(10)(x), keras.layers.Dense(1, kernel_regularizer="l2")(x)
    return keras.Model({"upper": upper, "lower": lower}, {"digit": digit, "odd": odd})


def sparse_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classification() -> Supervised:
    return Supervised(loss=sparse_loss(), metrics=[keras.metrics.SparseCategoricalAccuracy])


def two_output_task() -> Supervised:
    return Supervised(
        loss={"digit": sparse_loss(), "odd": keras.losses.BinaryCrossentropy(from_logits=True)},
        loss_weights={"odd": 0.5},
        metrics={
            "digit": [keras.metrics.SparseCategoricalAccuracy],
            "odd": [lambda: keras.metrics.AUC(from_logits=True)],
        },
    )


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.2)


def clipped_adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(3e-3, global_clipnorm=0.3)


def overwriting_sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3)


def two_optimizers() -> keras.optimizers.Optimizer:
    momentum = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    of_paths = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01, clipnorm=0.1), {".*bias": momentum})
    return keras.optimizers.MultiOptimizer(of_paths, loss_scale_factor=8.0)


def grouped_adamw() -> keras.optimizers.Optimizer:
    """No decay of biases, a slow first layer, and a last one that begins later."""
    plain = Group("bias$", decays=False), Group("dense_1/", frozen_for="0.5 epochs")
    layerwise = LayerwiseDecay(r"dense_?(\d*)/", 0.5)
    rate = schedules.ForBatch(schedules.CosineDecay(3e-3, "1 of run"), 64)
    return Grouped(lambda: keras.optimizers.AdamW(rate, weight_decay=0.1), plain, layerwise)()


def model_of_optimizers() -> keras.Model:
    """A layer for each of `OPTIMIZERS`, side by side, with initial weights that a test can tell."""
    inputs = keras.Input((64,))
    hidden = []
    for seed, name in enumerate(OPTIMIZERS):
        initial = keras.initializers.GlorotUniform(seed)
        hidden.append(keras.layers.Dense(16, "tanh", kernel_initializer=initial, name=f"by_{name}")(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Concatenate()(hidden)))


def each_optimizer() -> keras.optimizers.Optimizer:
    by_path = {f"by_{name}/.*": make() for name, make in OPTIMIZERS.items()}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), by_path))


def ema_sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.2, momentum=0.9, use_ema=True, ema_momentum=0.9)


def one_hot_digits(num_examples: int = 448) -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits(num_examples)
    return images, np.eye(10, dtype=np.float32)[labels]


def softmax_model() -> keras.Model:
    model = dense_model(batch_norm=True)
    return keras.Model(model.inputs, keras.layers.Softmax()(model.output))


@keras.saving.register_keras_serializable()
class OwnMethods(keras.Model):
    """A loss of the model's own, on top of Keras's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.inner = keras.layers.Dense(16, activation="tanh", kernel_regularizer="l2")
        self.outer = keras.layers.Dense(10)

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        own = keras.losses.MeanSquaredError()(keras.ops.zeros_like(y_pred), y_pred)  # which Keras divides by replicas
        small = 0.01 * keras.ops.mean(keras.ops.abs(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.01 * own + small


def own_methods_model() -> keras.Model:
    model = OwnMethods()
    model(keras.KerasTensor((None, 64)))
    model.compile(sgd(), sparse_loss())
    return model


class Hits(keras.metrics.Metric):
    """As in the documentation of `keras.metrics.Metric`: the result is the variable."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.hits = self.add_variable((), "zeros", name="hits")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        hits = keras.ops.equal(y_true, keras.ops.cast(keras.ops.argmax(y_pred, -1), y_true.dtype))
        hits = keras.ops.cast(hits, "float32")
        self.hits.assign_add(keras.ops.sum(hits if sample_weight is None else hits * sample_weight))

    def result(self) -> Any:
        return self.hits


def counting() -> Supervised:
    """Metrics that keep counts: one whose result is its variable, and a confusion matrix."""
    iou = lambda: keras.metrics.MeanIoU(10, sparse_y_pred=False)  # noqa: E731
    return Supervised(loss=sparse_loss(), metrics=[Hits, iou])


def float64_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dense(16, activation="tanh", dtype="float64")(inputs)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def tagged_words() -> tuple[Any, Any]:
    """Words, 0 where there is none, with a tag each that is -1 now and then; and the digit."""
    (found, labels), rng = words(64), np.random.default_rng(3)
    there = np.arange(8) < rng.integers(1, 9, len(labels))[:, np.newaxis]
    tags = np.where(rng.uniform(size=found.shape) < 0.2, -1, found % 3)
    return np.where(there, found % 15 + 1, 0).astype(np.int32), {"tags": tags, "digit": labels}


def tagging_model() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(16, 8, mask_zero=True, embeddings_regularizer="l2")(inputs)
    flat = keras.layers.Flatten()(keras.layers.Embedding(16, 8)(inputs))
    return keras.Model(inputs, {"tags": keras.layers.Dense(3)(x), "digit": keras.layers.Dense(10)(flat)})


def masked_and_summed() -> Supervised:
    """Two outputs that are divided by different things: what a mask and ignore_class leave, and nothing."""
    ignoring = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return Supervised(loss={"tags": ignoring, "digit": summed}, loss_weights={"digit": 0.01})


def classification_by(reduction: str) -> Callable[[], Supervised]:
    def task() -> Supervised:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        return Supervised(loss=loss, metrics=[keras.metrics.SparseCategoricalAccuracy])

    return task


def dropout_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dropout(0.3)(keras.layers.Dense(32, "tanh")(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


@keras.saving.register_keras_serializable("tfdist_tests")
class NoisyDense(keras.layers.Layer):
    """Adds noise to its weights, the same for all rows of a batch (Fortunato et al., "Noisy Networks", 2018)."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 10))
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        noise = keras.random.normal(self.kernel.shape, stddev=0.1, seed=self.seeds)
        return keras.ops.matmul(inputs, self.kernel + noise if training else self.kernel)


def random_model() -> keras.Model:
    """Draws in most of the ways in which Keras's layers do: an image, a channel, a number, a step in time, weights."""
    inputs = keras.Input((64,))
    x = keras.layers.RandomTranslation(0.2, 0.2, seed=1)(keras.layers.Reshape((8, 8, 1))(inputs))
    x = keras.layers.RandomFlip("horizontal", seed=2)(keras.layers.GaussianNoise(0.1)(x))
    x = keras.layers.SpatialDropout2D(0.3)(keras.layers.Conv2D(6, 3, activation="tanh")(x))
    x = keras.layers.LSTM(8, dropout=0.2, recurrent_dropout=0.2)(keras.layers.Reshape((6, 36))(x))
    x = keras.layers.AlphaDropout(0.2)(keras.layers.GaussianDropout(0.2)(keras.layers.Dense(48, "selu")(x)))
    return keras.Model(inputs, NoisyDense()(keras.layers.Dropout(0.2)(x)))


def float8_model() -> keras.Model:
    """Rounds to float8 what comes in and what flows back. Without biases, whose gradients Keras rounds to bfloat16."""
    inputs = keras.Input((64,))
    x = keras.layers.Reshape((2, 8))(keras.layers.Dense(16, "tanh", use_bias=False)(inputs))
    x = keras.layers.Flatten()(keras.layers.EinsumDense("abc,cd->abd", (2, 6))(x))
    model = keras.Model(inputs, keras.layers.Dense(10, use_bias=False)(x))
    model.quantize("float8")
    return model


def quantized_model() -> keras.Model:
    """Layers of int8 and int4, whose weights stay as they are, in front of a trained one."""
    inputs = keras.Input((64,))
    whole = keras.ops.cast(16 * inputs, "int32")
    parts = []
    for mode in ("int8", "int4"):
        quantized = [keras.layers.Dense(16, "tanh"), keras.layers.EinsumDense("abc,cd->abd", (8, 4))]
        quantized.append(keras.layers.Embedding(17, 4))
        outputs = [quantized[0](inputs), quantized[1](keras.layers.Reshape((8, 8))(inputs)), quantized[2](whole)]
        parts += [keras.layers.Flatten()(output) for output in outputs]
        for layer in quantized:
            layer.quantize(mode)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Concatenate()(parts)))


def plain_convnet_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Conv2D(8, 3, activation="tanh")(keras.layers.Reshape((8, 8, 1))(inputs))
    x = keras.layers.Dropout(0.2)(keras.layers.Conv2D(8, 3, strides=2, activation="tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))


def attentive_model() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dense(16)(keras.layers.Reshape((8, 8))(inputs))
    x = TransformerBlock(2, causal=False, dropout=0.1)(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))


def blocks_model() -> keras.Model:
    """A block with batch normalization and one with attention, as layers of their own."""
    inputs = keras.Input((64,))
    normalized = [
        keras.layers.Dense(64, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Activation("tanh"),
    ]
    x = keras.Sequential(normalized, name="normalized")(inputs)
    x = TransformerBlock(2, causal=True, name="attentive")(keras.layers.Reshape((8, 8))(x))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))


def staged_model() -> keras.Model:
    """As `blocks_model`, with a dropout, and a layer called "second" at which another stage may begin."""
    inputs = keras.Input((64,))
    x = keras.layers.Dense(64, "tanh")(inputs)
    normalized = [keras.layers.Dense(64, use_bias=False), keras.layers.BatchNormalization(momentum=0.9)]
    x = keras.Sequential(normalized, name="normalized")(x)
    x = keras.layers.Reshape((8, 8))(keras.layers.Activation("tanh")(x))
    x = TransformerBlock(2, causal=True, dropout=0.1, name="second")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))


def constrained_model() -> keras.Model:
    inputs = keras.Input((64,))
    return keras.Model(inputs, keras.layers.Dense(10, kernel_constraint=keras.constraints.MaxNorm(0.4))(inputs))


def named_model(first: str = "hidden", last: str = "head") -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dense(16, "tanh", name=first)(inputs)
    return keras.Model(inputs, keras.layers.Dense(10, name=last)(x))


def teacher() -> str:
    """A model that knows nothing, but always the same, as a file."""
    directory = tempfile.mkdtemp(prefix="tfdist-teacher-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    keras.utils.set_random_seed(5)
    named_model().save(f"{directory}/teacher.keras")
    return f"{directory}/teacher.keras"


def image_digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits(453)
    return images.reshape(-1, 8, 8, 1), labels


def cut_mixed() -> mixing.CutMix:
    return mixing.CutMix(image_digits, alpha=1.0, num_classes=10)


def flat_model() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    return keras.Model(inputs, dense_model()(keras.layers.Flatten()(inputs)))


def soft_classification() -> Supervised:
    return Supervised(loss=keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


def two_views() -> drawn.TwoViews:
    translate = lambda: keras.layers.RandomTranslation(0.2, 0.2)  # noqa: E731
    return drawn.TwoViews(image_digits, augmentation=[translate])


def adversarial() -> Adversarial:
    return Adversarial(epsilon=0.05, steps=2, bounds=(0.0, 1.0), loss=sparse_loss(), metrics=["accuracy"])


def tokens() -> np.ndarray:
    return (digits()[0].ravel() * 16).astype(np.int32)


def hidden_tokens() -> drawn.MaskedTokens:
    return drawn.MaskedTokens(TokenWindows(tokens, length=64), mask_token=17, vocabulary_size=17, rate=0.3)


def language_model() -> keras.Model:
    inputs = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(18, 16)(inputs)
    x = x + keras.layers.Conv1D(16, 3, padding="same", activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(17)(x))


def two_learned_losses() -> UncertaintyWeighted:
    losses = {"digit": sparse_loss(), "odd": keras.losses.BinaryCrossentropy(from_logits=True)}
    return UncertaintyWeighted(loss=losses)


BASE: dict[str, Any] = {
    "model": dense_model,
    "optimizer": sgd,
    "task": classification,
    "train_data": digits,
    "eval_data": lambda: digits(101),
    "global_batch_size": 64,
    "epochs": 2,
    "seed": 11,
    "deterministic": True,
}

# In order, so that the example that overflows is in the middle step and in the last replica's part of it.
OVERFLOW: dict[str, Any] = {"precision": "float16", "shuffle": False, "eval_data": None, "epochs": 1}

SHORT: dict[str, Any] = {"epochs": 1, "eval_data": None, "train_data": lambda: digits(501)}
DIVERGING: dict[str, Any] = {
    "model": linear_model,
    "task": lambda: Supervised(loss=keras.losses.MeanSquaredError()),
    "optimizer": diverging_sgd,
    "train_data": lambda: one_hot_digits(),
    "eval_data": None,
    "checkpoint": CheckpointPolicy(every_steps=3),
    "recovery": Rollback(rate=1e-14),
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.02),
    "adamax": lambda: keras.optimizers.Adamax(3e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(0.02),
    "lamb": lambda: keras.optimizers.Lamb(3e-3),
    "lars": lambda: Lars(schedules.Warmup(1.0, "3 steps", start=0.1), trust_coefficient=0.02, decay=1e-3),
    "lion": lambda: keras.optimizers.Lion(1e-4),
    "muon": lambda: keras.optimizers.Muon(1e-3),
    "nadam": lambda: keras.optimizers.Nadam(3e-3),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3, epsilon=1e-3),
}
CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam_clipped": {"optimizer": clipped_adam},
    "accumulation": {"num_microbatches": 4, "train_data": lambda: digits(501)},
    "uneven": {
        "train_data": lambda: digits(501),
        "eval_data": {"near": lambda: digits(101), "far": EvalSet(lambda: digits(57), batch_size=24)},
    },
    "fewer_examples_than_replicas": {"train_data": lambda: digits(257), "model": convnet_model},
    "sample_weights": {"train_data": weighted_digits, "eval_data": weighted_digits},
    "weightless": {"train_data": with_weightless_batch, "shuffle": False, "optimizer": clipped_adam},
    "large_embedding": {
        "model": lambda: embedding_model(70_016),
        "train_data": lambda: words(70_016),
        "eval_data": None,
        "optimizer": clipped_adam,
        "num_microbatches": 2,
    },
    "batch_norm": {"model": lambda: dense_model(batch_norm=True), "train_data": lambda: digits(501)},
    "batch_norm_masked": {"model": masked_batch_norm_model, "train_data": padded_words, "eval_data": None},
    "batch_norm_convolution": {"model": convnet_model, "num_microbatches": 2, "train_data": lambda: digits(501)},
    "ema": {"optimizer": ema_sgd},
    "two_outputs": {
        "model": two_output_model,
        "task": two_output_task,
        "train_data": two_outputs,
        "eval_data": two_outputs,
    },
    "masked_and_summed": {
        "model": tagging_model,
        "task": masked_and_summed,
        "train_data": tagged_words,
        "eval_data": tagged_words,
        "global_batch_size": 16,
        "num_microbatches": 2,
    },
    "summed": {
        "task": classification_by("sum"),
        "optimizer": lambda: keras.optimizers.SGD(0.2 / 16),
        "global_batch_size": 16,
        "train_data": lambda: digits(501),
        "model": lambda: dense_model(regularizer="l2"),
    },
    "mean_with_sample_weight": {
        "task": classification_by("mean_with_sample_weight"),
        "train_data": weighted_digits,
        "eval_data": weighted_digits,
        "num_microbatches": 2,
    },
    "whole_batch": {
        "model": softmax_model,
        "task": lambda: Supervised(loss=keras.losses.Dice()),
        "train_data": lambda: one_hot_digits(257),
        "eval_data": lambda: one_hot_digits(101),
    },
    "own_methods": {
        "model": own_methods_model,
        "optimizer": None,
        "task": lambda: None,
        "train_data": lambda: digits(257),
    },
    "counting_metrics": {"task": counting, "train_data": lambda: digits(501)},
    "float64": {"model": float64_model, "train_data": lambda: digits(501), "task": counting},
    "ema_overwriting": {"optimizer": overwriting_sgd},
    "two_optimizers": {"optimizer": two_optimizers},
    "settings_of_an_optimizer": {
        "model": constrained_model,
        "optimizer": lambda: keras.optimizers.SGD(0.2, loss_scale_factor=100.0, clipvalue=0.01, weight_decay=0.05),
    },
    "added_losses": {"model": adding_model, "train_data": weighted_in_part, "shuffle": False},
    "added_losses_mean_of_weights": {
        "model": adding_model,
        "train_data": weighted_in_part,
        "task": lambda: classification_by("mean_with_sample_weight")(),
        "num_microbatches": 2,
    },
    "counts": {"model": counting_model, "train_data": lambda: digits(453), "shuffle": False},
    "float8": {"model": float8_model, "train_data": lambda: digits(257), "log_gradient_norm": True},
    "float8_weighted": {
        "model": float8_model,
        "train_data": weighted_digits,
        "task": lambda: classification_by("mean_with_sample_weight")(),
        "num_microbatches": 3,
        "optimizer": clipped_adam,
    },
    "quantized": {"model": quantized_model, "train_data": lambda: digits(257), "num_microbatches": 2},
    "random_layers": SHORT | {"model": random_model, "train_data": digits, "optimizer": clipped_adam},
    "random_layers_uneven": SHORT
    | {"model": random_model, "train_data": lambda: digits(501), "optimizer": clipped_adam, "num_microbatches": 2},
    "clipnorm": {"optimizer": lambda: keras.optimizers.SGD(0.2, clipnorm=0.05), "log_gradient_norm": True},
    "overflow": OVERFLOW | {"train_data": overflowing_digits},
    "overflow_left_out": OVERFLOW | {"train_data": lambda: digits(128)},
    "optimizers": SHORT | {"model": model_of_optimizers, "optimizer": each_optimizer},
    "rolled_back": DIVERGING,
    "renewed_statistics": SHORT
    | {
        "model": convnet_model,
        "num_microbatches": 2,
        "optimizer": lambda: keras.optimizers.SGD(0.2, use_ema=True),
        "swa_start": "0.5 of run",
    },
    "recomputed": SHORT | {"model": blocks_model, "recompute": ("normalized", "attentive"), "num_microbatches": 2},
    "lora": SHORT | {"model": lambda: adapted(named_model, rank=2, layers=["hidden"], also=["head"])},
    "distillation": {"model": named_model, "task": lambda: Distillation(teacher=teacher(), loss=sparse_loss())},
    "mixup": SHORT | {"train_data": lambda: mixing.MixUp(digits, num_classes=10), "task": soft_classification},
    "cutmix": SHORT | {"train_data": cut_mixed, "model": flat_model, "task": soft_classification},
    "contrastive": SHORT
    | {"train_data": two_views, "model": flat_model, "task": Contrastive, "optimizer": clipped_adam},
    "adversarial": {"task": adversarial},
    "masked_tokens": SHORT | {"train_data": hidden_tokens, "model": language_model, "task": LanguageModel},
    "learned_losses": {
        "model": two_output_model,
        "task": two_learned_losses,
        "train_data": two_outputs,
        "eval_data": two_outputs,
    },
    "reduced_bfloat16": {"reduce_precision": "bfloat16", "train_data": lambda: digits(501)},
    "reduced_float16": {"reduce_precision": "float16", "optimizer": clipped_adam, "num_microbatches": 2},
    **{
        f"reduced_rows_{precision}": {
            "model": lambda: embedding_model(70_016),
            "train_data": lambda: words(70_016),
            "eval_data": None,
            "reduce_precision": precision,
        }
        for precision in ("bfloat16", "float16")
    },
    "reduced_overflow": OVERFLOW | {"train_data": overflowing_digits, "reduce_precision": "float16"},
    "groups": SHORT | {"optimizer": grouped_adamw},
}

# Others show what evaluation does.
for _name in (
    *("sgd", "adam_clipped", "accumulation", "weightless", "batch_norm", "batch_norm_convolution", "summed"),
    *("own_methods", "two_optimizers", "settings_of_an_optimizer", "added_losses_mean_of_weights", "clipnorm"),
    *("reduced_bfloat16", "reduced_float16", "float8", "float8_weighted", "quantized"),
):
    CASES[_name] = CASES[_name] | {"eval_data": None}

# Compared with themselves on the same strategy, with the optimizer's state at one replica and at all.
DEEP_CONVNET: dict[str, Any] = {
    "model": lambda: deep_convnet_model(dropout=0.0),
    "optimizer": sgd,
    "train_data": digits,
    "epochs": 2,
}
UNSHARDED: dict[str, dict[str, Any]] = {
    **{f"optimizer_{name}": SHORT | {"optimizer": OPTIMIZERS[name]} for name in ("lamb", "muon", "nadam")},
    "dropout": SHORT | {"model": dropout_model, "optimizer": clipped_adam},
    "blocks": SHORT | {"model": blocks_model, "optimizer": clipped_adam, "num_microbatches": 2},
    "attention": SHORT | {"model": attentive_model, "optimizer": lambda: keras.optimizers.Lamb(3e-3)},
    "attention_bfloat16": SHORT | {"model": attentive_model, "optimizer": clipped_adam, "precision": "bfloat16"},
    "attention_clipped": SHORT
    | {"model": attentive_model, "optimizer": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.5)},
    "attention_averaged": SHORT
    | {"model": attentive_model, "optimizer": lambda: keras.optimizers.SGD(0.01, use_ema=True), "eval_data": digits},
    "bfloat16": SHORT | {"precision": "bfloat16", "optimizer": clipped_adam},
    "deep_convnet": SHORT | DEEP_CONVNET,
}
PLAIN = ("dropout", "bfloat16")
SHARDED_CASES = {
    "weights": ("blocks", "attention", "attention_bfloat16", "attention_averaged", "attention_clipped"),
    "optimizer": (
        *("adam_clipped", "accumulation", "batch_norm", "ema", "overflow", "optimizer_lamb", *PLAIN),
        *("groups", "optimizer_muon", "optimizer_nadam", "large_embedding", "ema_overwriting"),
        *("reduced_float16", "reduced_rows_bfloat16", "float8"),
    ),
    "host": ("accumulation", "optimizer_lamb", "ema_overwriting"),
}
SHARDED: dict[str, dict[str, Any]] = {
    f"{sharding}_{case}": {**(CASES | UNSHARDED)[case], "sharding": sharding}
    for sharding, names in SHARDED_CASES.items()
    for case in names
}
SPLIT_LAYERS = {
    "attention_clipped": ["transformer*", "dense*"],
    "attention_averaged": ["transformer*"],
    "blocks": ["normalized", "attentive"],
    "groups": ["*"],
    "large_embedding": ["embedding*"],
}
SHARDED |= {
    f"tensors_{case}": {**(CASES | UNSHARDED)[case], "sharding": layers} for case, layers in SPLIT_LAYERS.items()
}

# The same steps in one stage and in several.
STAGED: dict[str, dict[str, Any]] = {
    f"staged_{name}": {"model": staged_model, "num_microbatches": 4, "eval_data": None} | case
    for name, case in {
        "adam": {"optimizer": clipped_adam},
        "whole": {"num_microbatches": 1},
        "ema": {"optimizer": overwriting_sgd, "eval_data": lambda: digits(101)},
        "float16": {"precision": "float16"},
        "groups": {"optimizer": grouped_adamw},
    }.items()
}

# The same bits on any number of replicas.
CANONICAL: dict[str, dict[str, Any]] = {
    f"canonical_{name}": SHORT | {"train_data": digits, "epochs": 2, "deterministic": 8} | case
    for name, case in {
        "dropout": {"model": dropout_model, "optimizer": clipped_adam},
        "convolution": {"model": plain_convnet_model, "task": counting, "precision": "bfloat16"},
        "deep_convnet": DEEP_CONVNET | {"deterministic": 4},
        "attention": {"model": attentive_model, "optimizer": lambda: keras.optimizers.Lamb(3e-3)},
        "float8": {"model": float8_model, "train_data": weighted_digits},
        "weights": {"train_data": weighted_digits, "sharding": "optimizer", "optimizer": clipped_adam},
        "xla": {"model": dropout_model, "optimizer": clipped_adam, "xla": "pass"},
        "microbatches": {"num_microbatches": 2, "deterministic": 6, "optimizer": clipped_adam},
        "uneven": {"model": dropout_model, "train_data": lambda: digits(457), "task": counting},
        "uneven_batch_norm": DEEP_CONVNET | {"train_data": lambda: digits(387), "drop_remainder": False},
        "uneven_xla": {"train_data": lambda: digits(457), "sharding": "optimizer", "xla": "pass"},
    }.items()
}


def wide_model(layers: int = 40) -> keras.Model:
    """Many small layers side by side, for an optimizer that computes scalars of each."""
    inputs = keras.Input((64,))
    initializers = map(keras.initializers.GlorotUniform, range(layers))
    hidden = [keras.layers.Dense(4, "tanh", kernel_initializer=each)(inputs) for each in initializers]
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Concatenate()(hidden)))


# Compared with itself in another process.
REPEATED: dict[str, dict[str, Any]] = {"wide": SHORT | {"model": wide_model, "optimizer": OPTIMIZERS["lars"]}}


def main(strategy_name: str, directory: str, names: list[str]) -> None:
    strategy = STRATEGIES[strategy_name]()
    strategy.connect()
    for name in names or CASES:
        settings = BASE | (CASES | UNSHARDED | SHARDED | CANONICAL | STAGED | REPEATED)[name]
        settings["task"] = settings["task"]()
        train(TrainSettings(strategy=strategy, **settings), Request(run_dir=str(pathlib.Path(directory, name))))
        tf.keras.backend.clear_session()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
