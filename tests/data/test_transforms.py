"""What is mixed, hidden or drawn beside examples, by hand."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from data_streams import global_batches, same
from mistakes import call, each_is_refused

from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.source import Source
from tfdist.data.text.token_windows import TokenWindows
from tfdist.data.transforms.drawn import MaskedTokens, TwoViews
from tfdist.data.transforms.mixing import CutMix, MixUp

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
