"""A tf.data pipeline of one's own: digits with noise, in another order each epoch.

configs/experiments/digits_dataset.gin trains on it. As it asks for `seed`, it is made anew for every epoch.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.data.sources.sklearn_sets import load_digits


def make_train_dataset(seed: int) -> tf.data.Dataset:
    images, labels = load_digits(split="train")
    numbers = tf.data.Dataset.range(len(labels)).shuffle(len(labels), seed=seed)

    def noisy(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        noise = tf.random.stateless_normal([8, 8, 1], seed=tf.stack([tf.constant(seed, tf.int64), number]), stddev=0.05)
        return tf.gather(images, number) + noise, tf.gather(labels, number)

    return numbers.map(noisy, num_parallel_calls=2)


def make_test_dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(load_digits(split="test"))
