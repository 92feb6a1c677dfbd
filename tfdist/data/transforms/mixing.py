"""Mixup and CutMix: every example of a training batch mixed with another one of the same global batch.

One draw holds for a whole batch, as in the papers. The partner of a batch's example i of n is example n - 1 - i, which
is any other one, since batches are shuffled. A worker reads the partners of its examples itself, so each example is
read twice.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data.sources.source import Order, Reader, Source, example_seeds
from tfdist.data.transforms.mapped import Mapped, split_examples
from tfdist.errors import UserError
from tfdist.settings.checks import POSITIVE, or_none, whole_number


class _Mixer(Mapped):
    """Examples (x, y), x and y of which become means of two, weighted by λ ~ Beta(alpha, alpha) and 1 - λ.

    Args:
      data: a data function or source of (x, y).
      alpha: above 0; 1 draws λ evenly, smaller values draw it close to 0 or 1.
      num_classes: makes float32 [n, num_classes] of whole numbers y; None for y of floats.

    Raises:
      UserError: an argument or the data does not fit.
    """

    _salt = 0
    _takes_images = False

    def __init__(self, data: Callable[[], Any] | Source, *, alpha: float = 0.2, num_classes: int | None = None) -> None:
        super().__init__(data)
        name = type(self).__name__
        POSITIVE(f"{name}.alpha", alpha)
        or_none(whole_number(2))(f"{name}.num_classes", num_classes)
        self._alpha, self._num_classes = float(alpha), num_classes

    def describe_output(self, structure: Any) -> Any:
        """The specs of mixed inputs and targets."""
        name, parts = type(self).__name__, split_examples(structure)
        if len(parts) != 2 or not all(isinstance(part, tf.TensorSpec) for part in parts):
            raise UserError(f"{name} takes examples (x, y), one array each; the data gives {structure}.")
        x, y = parts
        if not x.dtype.is_floating or not x.shape[1:].is_fully_defined():
            raise UserError(f"{name} mixes floats of one shape; x is {x.dtype.name}{x.shape.as_list()}. Cast it.")
        if self._takes_images and x.shape.rank != 4:
            raise UserError(f"{name} takes images, [n, height, width, channels]; x is {x.shape.as_list()}.")
        if self._num_classes is None:
            if not y.dtype.is_floating:
                raise UserError(
                    f"{name} mixes targets, and y is {y.dtype.name}{y.shape.as_list()}. Write {name}.num_classes, so "
                    "that classes become vectors, and a loss of these, CategoricalCrossentropy; for evaluations too."
                )
            return x, y
        if not y.dtype.is_integer or y.shape.rank not in (1, 2) or (y.shape.rank == 2 and y.shape[1] != 1):
            raise UserError(
                f"{name}.num_classes is for y of whole numbers, [n]; the data gives {y.dtype.name}{y.shape.as_list()}."
            )
        return x, tf.TensorSpec([None, self._num_classes], tf.float32)

    @abc.abstractmethod
    def mix_inputs(
        self, x: tf.Tensor, partner: tf.Tensor, share: tf.Tensor, seeds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The inputs, and float32 [n], how much of each is `x`.

        Args:
          x, partner: inputs [n, …].
          share: float32 [n], λ.
          seeds: int32 [n, 2], the same for all of a batch.
        """

    def wrap_reader(self, read: Reader, order: Order) -> Reader:
        """Reads each example's partner, and mixes both."""
        if order.seed is None:
            return lambda positions, epoch: self._encode_classes(read(positions, epoch))
        seed, size, num_examples = order.seed, order.batch_size, self.num_examples

        def read_mixed(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            batches = positions // size
            first = batches * size
            last = tf.minimum(first + size, num_examples) - 1
            (x, y), (other_x, other_y) = (
                self._encode_classes(read(places, epoch)) for places in (positions, first + last - positions)
            )
            seeds = example_seeds(batches, epoch, (seed + self._salt) & 0x7FFFFFFF)
            x, share = self.mix_inputs(x, other_x, self._draw_shares(seeds), seeds)
            share = tf.cast(tf.reshape(share, [-1, *[1] * (y.shape.rank - 1)]), y.dtype)
            return x, share * y + (1 - share) * other_y

        return read_mixed

    def _draw_shares(self, seeds: tf.Tensor) -> tf.Tensor:
        """float32 [n], λ."""

        def draw_share(seed: tf.Tensor) -> tf.Tensor:
            drawn = tf.random.stateless_gamma([2], seed, self._alpha)
            return tf.where(tf.reduce_sum(drawn) > 0, drawn[0] / tf.reduce_sum(drawn), 1.0)

        return tf.map_fn(draw_share, seeds, fn_output_signature=tf.TensorSpec([], tf.float32))

    def _encode_classes(self, examples: Any) -> tuple[tf.Tensor, tf.Tensor]:
        x, y = split_examples(examples)
        if self._num_classes is None:
            return x, y
        y = tf.reshape(y, [-1])
        count = self._num_classes
        message = f"{type(self).__name__}.num_classes is {count}, and a label is not one of 0 … {count - 1}:"
        check = tf.debugging.Assert(tf.reduce_all((y >= 0) & (y < count)), [message, y])
        with tf.control_dependencies([check]):
            return x, tf.one_hot(y, count)


class MixUp(_Mixer):
    """Inputs and targets are weighted means of two examples' (Zhang et al., "mixup", 2018). In a gin file:

        train.train_data = @mixing.MixUp
        mixing.MixUp.data = @train/sklearn_sets.load_digits
        mixing.MixUp.num_classes = 10

    An evaluation mixes nothing; there the class alone turns the targets into vectors. Arguments and errors: `_Mixer`.
    """

    _salt = 0x3A11

    def mix_inputs(
        self, x: tf.Tensor, partner: tf.Tensor, share: tf.Tensor, seeds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Weighs both inputs."""
        del seeds
        weight = tf.cast(tf.reshape(share, [-1, *[1] * (x.shape.rank - 1)]), x.dtype)
        return weight * x + (1 - weight) * partner, share


class CutMix(_Mixer):
    """A box of each image is another's, and the targets are mixed by area (Yun et al., "CutMix", 2019).

    For x of images, [n, height, width, channels]. Arguments and errors: `_Mixer`.
    """

    _salt = 0x3A12
    _takes_images = True

    def mix_inputs(
        self, x: tf.Tensor, partner: tf.Tensor, share: tf.Tensor, seeds: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Puts a box of the partner into each image."""
        height, width = x.shape[1:3]
        centers = tf.map_fn(
            lambda seed: tf.random.stateless_uniform([2], seed + 1),
            seeds,
            fn_output_signature=tf.TensorSpec([2], tf.float32),
        )

        def find_inside(size: int, center: tf.Tensor) -> tf.Tensor:
            """bool [n, size]: where the box is, along one axis."""
            middle = tf.floor(center * size)
            half = tf.floor(size * tf.sqrt(1 - share)) / 2
            places = tf.range(size, dtype=tf.float32)[tf.newaxis]
            return (places >= (middle - half)[:, tf.newaxis]) & (places < (middle + half)[:, tf.newaxis])

        box = find_inside(height, centers[:, 0])[:, :, tf.newaxis] & find_inside(width, centers[:, 1])[:, tf.newaxis]
        area = tf.reduce_mean(tf.cast(box, tf.float32), axis=[1, 2])
        return tf.where(box[..., tf.newaxis], partner, x), 1 - area
