"""Norms of gradients, updates and weights, and how gradients are spread, seen once in a call of the step function.

Invariant: looking changes nothing, and costs the steps that are not looked at nothing but a test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.base import Strategy
from tfdist.strategies.sparse import without_repeats

ALL, LAYERS = "all", "layers"
DEAD_AFTER = 20  # calls in a row
CLIPPED = "clipped"
GRADIENTS = "gradients/"  # before a variable's path: how its gradient is spread
BINS = 30  # as TensorBoard's own histograms have
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"


class Norms:
    """Looks at a step of one update.

    Args:
      strategy: connected.
      variables: that are trained.
      groups: "all" for the overall figures alone, "layers" for each layer's too, or regular expressions that are looked
        for in variables' paths, a group each; None for no norms.
      clipnorm: the optimizer's `global_clipnorm`, if it has one.
      spread: whether each gradient's histogram is seen too, `[BINS, 3]`: left and right edge and count of each bin.

    Raises:
      UserError: a pattern matches no variable.
    """

    def __init__(
        self,
        strategy: Strategy,
        variables: Sequence[keras.Variable],
        groups: Sequence[str] | str | None,
        clipnorm: float | None = None,
        *,
        spread: bool = False,
    ) -> None:
        self._strategy = strategy
        self._clipnorm = None if groups is None else clipnorm
        self._groups = {} if groups is None else _grouped(variables, groups)
        self._spread = [f"{GRADIENTS}{v.path}" for v in variables] if spread else []
        self.names = [
            f"{kind}{group}" for group in self._groups for kind in ("gradient_norm", "update_norm", "update_ratio")
        ]
        self.names += [] if self._clipnorm is None else [CLIPPED]

    def nothing(self) -> dict[str, tf.Tensor]:
        """The figures of no step."""
        figures = {name: tf.constant(math.nan) for name in self.names}
        return figures | {name: tf.zeros([BINS, 3]) for name in self._spread}

    def before(self, looks: tf.Tensor, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The weights before an update, copied only where `looks`; outside of any replica, or in a whole step.

        Of no norms nothing, as nothing is compared then.
        """
        if not self._groups:
            return []
        if self._strategy.needs_static_shapes:
            return [tf.identity(self._value(v)) for v in variables]
        copies = tf.cond(
            looks,
            lambda: [tf.identity(tf.reshape(self._value(v), [-1])) for v in variables],
            lambda: [tf.zeros([0], v.value.dtype) for v in variables],
        )
        return list(copies)

    def after(
        self,
        looks: tf.Tensor,
        before: Sequence[tf.Tensor],
        gradients: Sequence[Gradient],
        variables: Sequence[keras.Variable],
        old: Mapping[str, tf.Tensor],
    ) -> dict[str, tf.Tensor]:
        """The figures of this update where `looks`, else the old ones.

        Args:
          looks: bool scalar.
          before: as `before` gave them.
          gradients: of the update, before clipping.
          variables: that were updated, in their order.
          old: figures.
        """
        return tf.cond(looks, lambda: self._seen(before, gradients, variables), lambda: dict(old))

    def _seen(
        self, before: Sequence[tf.Tensor], gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
    ) -> dict[str, tf.Tensor]:
        values = [_values(gradient) for gradient in gradients]
        found = {name: tf.zeros([BINS, 3]) for name in self._spread}
        if self._spread:
            found |= {f"{GRADIENTS}{v.path}": _histogram(each) for v, each in zip(variables, values, strict=True)}
        return found | (self._figures(before, values, variables) if self._groups else {})

    def _figures(
        self, before: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> dict[str, tf.Tensor]:
        squares: dict[int, tuple[tf.Tensor, tf.Tensor, tf.Tensor]] = {}
        for variable, was, gradient in zip(variables, before, gradients, strict=True):
            was = tf.cast(tf.reshape(was, [-1]), tf.float32)
            change = tf.cast(tf.reshape(self._value(variable), [-1]), tf.float32) - was
            squares[id(variable)] = _square(gradient), _square(change), _square(was)
        found: dict[str, tf.Tensor] = {}
        for group, members in self._groups.items():
            held = [squares[id(v)] for v in members if id(v) in squares]
            gradient_norm, update_norm, weight_norm = (
                tf.sqrt(tf.add_n([each[i] for each in held])) if held else tf.constant(0.0) for i in range(3)
            )
            found[f"gradient_norm{group}"] = gradient_norm
            found[f"update_norm{group}"] = update_norm
            found[f"update_ratio{group}"] = tf.math.divide_no_nan(update_norm, weight_norm)
        if self._clipnorm is not None:
            found[CLIPPED] = tf.cast(found["gradient_norm"] > self._clipnorm, tf.float32)
        return found

    def _value(self, variable: keras.Variable) -> tf.Tensor:
        return tf.convert_to_tensor(self._strategy.first_local(variable.value))


class Watch:
    """Keeps the figures of an epoch's calls, on the host, and sees groups whose gradient stays zero."""

    def __init__(self) -> None:
        self._clipped: list[float] = []
        self._zero: dict[str, int] = {}
        self._told: set[str] = set()

    def observe(self, norms: Mapping[str, float]) -> list[str]:
        """Takes the figures of a call; the groups whose gradient was zero in the last calls, each once."""
        dead = []
        for name, value in norms.items():
            if name == CLIPPED:
                self._clipped.append(value)
            elif name.startswith("gradient_norm/"):
                group = name.partition("/")[2]
                self._zero[group] = self._zero.get(group, 0) + 1 if value == 0 else 0
                if self._zero[group] >= DEAD_AFTER and group not in self._told:
                    self._told.add(group)
                    dead.append(group)
        return dead

    def figures(self, norms: Mapping[str, float]) -> dict[str, float]:
        """The newest figures, and of those clipped the share among the calls of the epoch so far."""
        found = dict(norms)
        if self._clipped:
            found[CLIPPED] = sum(self._clipped) / len(self._clipped)
        return found

    def begin_epoch(self) -> None:
        """Begins the share anew."""
        self._clipped = []


def _grouped(variables: Sequence[keras.Variable], groups: Sequence[str] | str) -> dict[str, list[keras.Variable]]:
    """The variables by what is put behind a figure's name; "" is all."""
    found = {"": list(variables)}
    if groups == LAYERS:
        for variable in variables:
            found.setdefault(f"/{variable.path.rpartition('/')[0] or variable.path}", []).append(variable)
    elif groups != ALL:
        for pattern in groups:
            members = [v for v in variables if re.search(pattern, v.path)]
            if not members:
                some = ", ".join(v.path for v in variables[:8])
                raise UserError(f"train.log_norms names {pattern!r}, which matches no variable. The model has {some}.")
            found[f"/{pattern}"] = members
    return found


def _values(gradient: Gradient) -> tf.Tensor:
    """A gradient's numbers, those of a row once."""
    gradient = without_repeats(gradient)
    return tf.cast(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient, tf.float32)


def _square(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(values))


def _histogram(values: tf.Tensor) -> tf.Tensor:
    """`[BINS, 3]`: left and right edge and count of each bin, in operations that XLA has too."""
    values = tf.reshape(values, [-1])
    low, high = tf.reduce_min(values), tf.reduce_max(values)
    width = (high - low) / BINS
    places = tf.cast(tf.math.divide_no_nan(values - low, width), tf.int32)  # of equal values all in the first
    counts = tf.math.unsorted_segment_sum(tf.ones_like(values), tf.clip_by_value(places, 0, BINS - 1), BINS)
    left = low + width * tf.range(BINS, dtype=tf.float32)
    return tf.stack([left, left + width, counts], axis=1)
