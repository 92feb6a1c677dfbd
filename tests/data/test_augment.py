"""Keras's random layers give each example its own change, drawn from its seed alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from mistakes import each_is_refused

from tfdist.data.sources.augment import Augmentation
from tfdist.errors import UserError

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

IMAGES = np.random.default_rng(0).integers(0, 256, (EXAMPLES, SIZE, SIZE, 3)).astype(np.float32)
SEEDS = np.stack([np.arange(EXAMPLES) + 5, np.full(EXAMPLES, 7)], axis=1).astype(np.int32)


@functools.cache
def changing(*names: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """A graph that gives the augmented images of some indices; some layers take half a minute to trace."""
    augment = Augmentation([lambda n=n: getattr(keras.layers, n)(**LAYERS[n]) for n in names], STRUCTURE)
    return tf.function(
        lambda i: augment((tf.gather(IMAGES, i), i), tf.gather(SEEDS, i))[0],
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
    assert not np.array_equal(together, IMAGES)


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
        crop((tf.constant(IMAGES), tf.range(EXAMPLES)), tf.constant(SEEDS))
