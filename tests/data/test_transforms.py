"""What is mixed, hidden or drawn beside examples, by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_streams import global_batches, same
from mistakes import call, each_is_refused

from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.augment import Augmentation
from tfdist.data.sources.source import Source
from tfdist.data.text.token_windows import TokenWindows
from tfdist.data.transforms.drawn import MaskedTokens, TwoViews
from tfdist.data.transforms.mixing import CutMix, MixUp
from tfdist.errors import UserError

N, BATCH = 22, 8
IMAGES = np.random.default_rng(0).uniform(0.1, 1.0, (N, 6, 6, 1)).astype(np.float32)
LABELS = np.arange(N, dtype=np.int32) % 4
TOKENS = np.random.default_rng(1).integers(2, 30, (N, 40)).astype(np.int32)


def images() -> tuple[np.ndarray, np.ndarray]:
    return IMAGES, LABELS


def batches(source: Source, *, steps: int = 6, seed: int | None = 3) -> list[Any]:
    return global_batches(lambda: source, steps=steps, batch_size=BATCH, seed=seed)


SOURCES = {
    "cutmix": lambda: CutMix(images, num_classes=4, alpha=1.0),
    "views": lambda: TwoViews(images, augmentation=[lambda: keras.layers.RandomTranslation(0.3, 0.3)]),
    "masked": lambda: MaskedTokens(lambda: TOKENS, mask_token=1, vocabulary_size=30),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["views", "masked"])
def test_an_evaluation_draws_the_same_every_time(kind: str) -> None:
    found = batches(SOURCES[kind](), seed=None)
    assert same(found[:3], found[3:])


def plain(steps: int = 3) -> list[Any]:
    return batches(ArraySource(images()), steps=steps)


def test_mixup_is_a_mean_of_two_examples_and_of_their_classes() -> None:
    shares = set()
    for (x, y), (there_x, there_y) in zip(batches(MixUp(images, num_classes=4), steps=3), plain(), strict=True):
        vectors = np.eye(4, dtype=np.float32)[there_y]
        share = (x[0] - there_x[-1]).ravel()[0] / (there_x[0] - there_x[-1]).ravel()[0]
        assert 0 <= share <= 1
        np.testing.assert_allclose(x, share * there_x + (1 - share) * there_x[::-1], atol=2e-5)
        np.testing.assert_allclose(y, share * vectors + (1 - share) * vectors[::-1], atol=2e-5)
        shares.add(round(float(share), 4))
    assert len(shares) == 3  # one draw a batch, and another for the next


def test_a_label_that_is_no_class_is_not_mixed() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"MixUp.num_classes is 3, and a label is not one of 0 …"):
        batches(MixUp(images, num_classes=3), steps=1)


def test_cutmix_puts_in_a_box_and_weighs_the_classes_by_its_area() -> None:
    cut = 0
    for (x, y), (there_x, there_y) in zip(batches(SOURCES["cutmix"](), steps=3), plain(), strict=True):
        vectors = np.eye(4, dtype=np.float32)[there_y]
        is_own = np.all(np.isclose(x, there_x), axis=-1)
        np.testing.assert_allclose(x[~is_own], there_x[::-1][~is_own])
        box = ~is_own[0]
        rows, columns = box.any(axis=1), box.any(axis=0)
        np.testing.assert_array_equal(box, rows[:, np.newaxis] & columns[np.newaxis])
        share = is_own[0].mean()
        np.testing.assert_allclose(y, share * vectors + (1 - share) * vectors[::-1], atol=1e-6)
        cut += box.any()
    assert cut


def test_an_evaluation_mixes_nothing() -> None:
    x, y = batches(MixUp(images, num_classes=4), seed=None, steps=1)[0]
    np.testing.assert_array_equal(x, IMAGES[:BATCH])
    np.testing.assert_array_equal(y, np.eye(4)[LABELS[:BATCH]])


@pytest.mark.slow
def test_shares_of_mixup_are_those_of_the_beta_distribution() -> None:
    rows = np.arange(1200, dtype=np.float32)[:, np.newaxis] / 1200
    mixed = MixUp(lambda: (rows, rows), alpha=0.4)
    read = functools.partial(global_batches, steps=600, batch_size=2)
    means, pairs = (read(lambda made=made: made) for made in (mixed, ArraySource((rows, rows))))
    both = [(mean[0][0, 0], pair[0]) for mean, pair in zip(means, pairs, strict=True)]
    shares = np.array([(mean - pair[1, 0]) / (pair[0, 0] - pair[1, 0]) for mean, pair in both])
    assert abs(shares.mean() - 0.5) < 0.06
    assert abs(shares.var() - 1 / (4 * (2 * 0.4 + 1))) < 0.02  # of Beta(a, a): 1 ÷ (4 (2a + 1))


@pytest.mark.slow
def test_tokens_are_hidden_at_the_rate_and_in_the_shares_of_the_paper() -> None:
    padded = np.where(np.arange(40) < 30, TOKENS, 0)
    source = MaskedTokens(lambda: padded, mask_token=1, vocabulary_size=30, rate=0.3, padding_token=0)
    gaps, tokens, weights = (np.concatenate(each) for each in zip(*batches(source, steps=60), strict=True))
    chosen = weights == 1
    assert not chosen[tokens == 0].any()
    assert abs(chosen[tokens != 0].mean() - 0.3) < 0.02
    np.testing.assert_array_equal(gaps[~chosen], tokens[~chosen])
    assert abs((gaps[chosen] == 1).mean() - 0.8) < 0.03
    assert abs((gaps[chosen] == tokens[chosen]).mean() - 0.1) < 0.03


def test_windows_of_tokens_follow_each_other() -> None:
    source = TokenWindows(lambda: np.arange(23), length=5)
    assert source.num_examples == 4
    x, y = source.gatherer()(tf.constant([0, 3], tf.int64))
    np.testing.assert_array_equal(x, [[0, 1, 2, 3, 4], [15, 16, 17, 18, 19]])
    np.testing.assert_array_equal(y, x + 1)


def counted() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((4, 3), np.int32), np.zeros(4, np.int32)


test_what_does_not_fit_is_one_message = each_is_refused(
    call,
    (lambda: MixUp(images, alpha=0.0), "MixUp.alpha is 0.0"),
    (lambda: MixUp(images, num_classes=1), "MixUp.num_classes is 1"),
    (lambda: MixUp(images).structure, "Write MixUp.num_classes"),
    (lambda: MixUp(counted).structure, "Cast it"),
    (lambda: MixUp(lambda: IMAGES).structure, "takes examples (x, y)"),
    (lambda: CutMix(lambda: (IMAGES[:, 0, 0], LABELS), num_classes=4).structure, "CutMix takes images"),
    (lambda: MixUp(lambda: tf.data.Dataset.from_tensor_slices(images())), "use Dataset.map"),
    (lambda: TwoViews(images, augmentation=[]), "TwoViews.augmentation is empty"),
    (lambda: MaskedTokens(lambda: TOKENS, mask_token=1, vocabulary_size=30, rate=1.5), "MaskedTokens.rate is 1.5"),
    (lambda: MaskedTokens(images, mask_token=1, vocabulary_size=9).structure, "takes whole numbers [n, length]"),
    (lambda: TokenWindows(lambda: np.arange(4), length=4), "fewer than length + 1"),
    (lambda: TokenWindows(lambda: TOKENS, length=4), "one row of whole numbers"),
)


# Keras's random layers: each example has its own change, drawn from its seed alone


SIZE = 12
EXAMPLES = 13
STRUCTURE = (tf.TensorSpec([None, SIZE, SIZE, 3], tf.float32), tf.TensorSpec([None], tf.int64))
LAYERS = {
    "RandomFlip": {},
    "RandomRotation": {"factor": 0.1},
    "RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2},
    "RandomZoom": {"height_factor": 0.2},
    "RandomContrast": {"factor": 0.3},
    "RandomBrightness": {"factor": 0.3},
    "RandomShear": {"x_factor": 0.2, "y_factor": 0.2},
    "RandomHue": {"factor": 0.3},
    "RandomColorJitter": {"brightness_factor": 0.2, "contrast_factor": 0.2, "hue_factor": 0.2},
    "RandomErasing": {},
    "RandomGaussianBlur": {},
    "RandomPerspective": {},
    "RandomElasticTransform": {},
    "RandAugment": {},
    "GaussianNoise": {"stddev": 0.5},
    "Dropout": {"rate": 0.2},
}

PICTURES = np.random.default_rng(0).integers(0, 256, (EXAMPLES, SIZE, SIZE, 3)).astype(np.float32)
SEEDS = np.stack([np.arange(EXAMPLES) + 5, np.full(EXAMPLES, 7)], axis=1).astype(np.int32)


@functools.cache
def changing(*names: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """A graph that gives the augmented images of some indices; some layers take half a minute to trace."""
    augment = Augmentation([lambda n=n: getattr(keras.layers, n)(**LAYERS[n]) for n in names], STRUCTURE)
    return tf.function(
        lambda i: augment((tf.gather(PICTURES, i), i), tf.gather(SEEDS, i))[0],
        input_signature=[tf.TensorSpec([None], tf.int64)],
        autograph=False,
    )


def changed(names: list[str], *, batch: int, first: int = 0) -> np.ndarray:
    dataset = tf.data.Dataset.range(first, EXAMPLES).batch(batch)
    return np.concatenate([changing(*names)(indices) for indices in dataset])


@pytest.mark.parametrize("names", [[name] for name in LAYERS] + [["RandomFlip", "RandomRotation", "RandomContrast"]])
def test_what_becomes_of_an_example_depends_on_its_seed_alone(names: list[str]) -> None:
    together = changed(names, batch=EXAMPLES)
    np.testing.assert_array_equal(changed(names, batch=4), together)
    np.testing.assert_array_equal(changed(names, batch=1, first=6), together[6:])
    assert not np.array_equal(together, PICTURES)


def test_the_same_image_changes_differently_by_seed_and_by_layer() -> None:
    augment = Augmentation([lambda: keras.layers.RandomBrightness(0.5)], STRUCTURE)
    same_image = np.full((EXAMPLES, SIZE, SIZE, 3), 128, np.float32)
    found, _ = augment((tf.constant(same_image), tf.range(EXAMPLES)), tf.constant(SEEDS))
    assert len(set(found.numpy()[:, 0, 0, 0])) == EXAMPLES
    twice = Augmentation([lambda: keras.layers.RandomBrightness(0.2)] * 2, STRUCTURE)
    once = Augmentation([lambda: keras.layers.RandomBrightness(0.2)], STRUCTURE)
    first = once((tf.constant(same_image), tf.range(EXAMPLES)), tf.constant(SEEDS))[0].numpy()[:, 0, 0, 0] - 128
    both = twice((tf.constant(same_image), tf.range(EXAMPLES)), tf.constant(SEEDS))[0].numpy()[:, 0, 0, 0] - 128
    assert not np.allclose(both, 2 * first, atol=1)


def test_layers_compute_in_float32_whatever_the_models_precision() -> None:
    expected = changed(["RandomContrast"], batch=4)
    keras.config.set_dtype_policy("mixed_bfloat16")
    changing.cache_clear()
    np.testing.assert_array_equal(changed(["RandomContrast"], batch=4), expected)
    assert keras.config.dtype_policy().name == "mixed_bfloat16"


test_layers_that_do_not_fit_are_refused = each_is_refused(
    lambda builder: Augmentation([builder], STRUCTURE),
    (keras.layers.MixUp, "MixUp mixes the examples of a batch"),
    (keras.layers.AugMix, "AugMix draws its operations once"),
    (keras.layers.RandomRotation, "RandomRotation cannot be made.*factor"),
    (lambda: 3, "list of builders of Keras layers.*gives int"),
)


@pytest.mark.slow
def test_what_is_no_image_or_changes_its_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"changes images.*inputs here are \[30\]"):
        Augmentation([keras.layers.RandomFlip], (tf.TensorSpec([None, 30]), STRUCTURE[1]))
    crop = Augmentation([lambda: keras.layers.RandomCrop(6, 6)], STRUCTURE)
    with pytest.raises(UserError, match=r"makes \[6, 6, 3\] of images of \[12, 12, 3\]"):
        crop((tf.constant(PICTURES), tf.range(EXAMPLES)), tf.constant(SEEDS))
