"""Examples with something random beside them: two views of an image, hidden tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.sources.augment import Augmentation, LayerBuilder
from tfdist.data.sources.source import Order, Reader, Source, example_seeds
from tfdist.data.transforms.mapped import Mapped, split_examples
from tfdist.errors import UserError
from tfdist.settings.checks import whole_number


class TwoViews(Mapped):
    """Each image twice, augmented in two ways: {"first": x, "second": x}. Targets are left out.

    Args:
      data: a data function or source of images, x or (x, …).
      augmentation: builders of Keras layers, see `augment.py`; both views draw from them.

    Raises:
      UserError: the data are no images, or a layer cannot work on single examples.
    """

    def __init__(self, data: Callable[[], Any] | Source, *, augmentation: Sequence[LayerBuilder]) -> None:
        super().__init__(data)
        if not augmentation:
            raise UserError(
                "TwoViews.augmentation is empty; write a list of layers, [@keras.layers.RandomTranslation]."
            )
        self._augment = Augmentation(augmentation, split_examples(self.source.structure)[0])

    def describe_output(self, structure: Any) -> Any:
        """The specs of both views."""
        x = split_examples(structure)[0]
        return {"first": x, "second": x}

    def wrap_reader(self, read: Reader, order: Order) -> Reader:
        """Augments each image twice."""

        def draw_views(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            x, seeds = split_examples(read(positions, epoch))[0], example_seeds(positions, epoch, order.seed)
            return {"first": self._augment(x, seeds), "second": self._augment(x, seeds + tf.constant([0, 1]))}

        return draw_views


class MaskedTokens(Mapped):
    """Sequences some of whose tokens are hidden, to be predicted: (tokens with gaps, all tokens, weights).

    As Devlin et al. ("BERT", 2019) hide them: of the chosen tokens eight in ten become `mask_token`, one any token, one
    stays. The weights, float32 [n, length], are 1 for those chosen.

    Args:
      data: a data function or source of whole numbers [n, length], x or (x, …).
      mask_token: the number that stands for a hidden token.
      vocabulary_size: tokens are 0 … vocabulary_size - 1.
      rate: the share of tokens that is chosen.
      padding_token: is never chosen; None where there is no padding.

    Raises:
      UserError: an argument or the data does not fit.
    """

    def __init__(
        self,
        data: Callable[[], Any] | Source,
        *,
        mask_token: int,
        vocabulary_size: int,
        rate: float = 0.15,
        padding_token: int | None = None,
    ) -> None:
        super().__init__(data)
        whole_number(2)("MaskedTokens.vocabulary_size", vocabulary_size)
        whole_number(0)("MaskedTokens.mask_token", mask_token)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1:
            raise UserError(f"MaskedTokens.rate is {rate!r}; write a share between 0 and 1, such as 0.15.")
        self._mask, self._size, self._rate, self._padding = mask_token, vocabulary_size, float(rate), padding_token

    def describe_output(self, structure: Any) -> Any:
        """The specs of tokens with gaps, tokens and weights."""
        tokens = split_examples(structure)[0]
        if not isinstance(tokens, tf.TensorSpec) or not tokens.dtype.is_integer or tokens.shape.rank != 2:
            raise UserError(f"MaskedTokens takes whole numbers [n, length]; the data gives {structure}.")
        return tokens, tokens, tf.TensorSpec(tokens.shape, tf.float32)

    def wrap_reader(self, read: Reader, order: Order) -> Reader:
        """Hides tokens."""

        def hide_tokens(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            """Returns tokens with gaps and tokens, int32 [n, length], and the weights of the hidden ones."""
            tokens, seeds = split_examples(read(positions, epoch))[0], example_seeds(positions, epoch, order.seed)
            length = tf.shape(tokens)[1]
            drawn = tf.map_fn(
                lambda seed: tf.random.stateless_uniform([3, length], seed),
                seeds,
                fn_output_signature=tf.TensorSpec([3, None], tf.float32),
            )
            chosen = drawn[:, 0] < self._rate
            if self._padding is not None:
                chosen &= tokens != self._padding
            any_token = tf.cast(drawn[:, 2] * self._size, tokens.dtype)
            instead = tf.where(drawn[:, 1] < 0.8, tf.cast(self._mask, tokens.dtype), any_token)
            changed = tf.where(chosen & (drawn[:, 1] < 0.9), instead, tokens)
            return changed, tokens, tf.cast(chosen, tf.float32)

        return hide_tokens
