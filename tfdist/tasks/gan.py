"""Generative adversarial networks (Goodfellow et al., 2014)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError, is_whole_number
from tfdist.tasks.base import Term, WholeTerm
from tfdist.tasks.in_turns import InTurns, Turn

# How a discriminator's scores of real and of generated examples become the losses of both parts.
LOSSES: dict[str, tuple[Callable[[tf.Tensor, tf.Tensor], tf.Tensor], Callable[[tf.Tensor], tf.Tensor]]] = {
    "logistic": (
        lambda real, made: tf.nn.softplus(-real) + tf.nn.softplus(made),
        lambda made: tf.nn.softplus(-made),
    ),
    "hinge": (lambda real, made: tf.nn.relu(1 - real) + tf.nn.relu(1 + made), lambda made: -made),
    "least_squares": (lambda real, made: (real - 1) ** 2 + made**2, lambda made: (made - 1) ** 2),
}


class GenerativeAdversarial(InTurns):
    """A discriminator learns to tell examples from what a generator makes of noise, and the generator to deceive it.

    The model is a functional one of {"examples": x, "noise": [n, size]} that has both parts as layers; its own output
    does not matter. Data come from `drawn.WithNoise`, with as many draws as a step has updates.

    Args:
      loss: "logistic", the one of the paper that does not saturate; "hinge" (Lim and Ye, 2017); "least_squares" (Mao
        et al., 2017).
      discriminator_updates: in a step, before the generator's one.
      generator, discriminator: names of the two layers.

    Raises:
      UserError: an argument is something else, or model or data have other parts.
    """

    def __init__(
        self,
        *,
        loss: str = "logistic",
        discriminator_updates: int = 1,
        generator: str = "generator",
        discriminator: str = "discriminator",
    ) -> None:
        if loss not in LOSSES:
            raise UserError(f"GenerativeAdversarial.loss is {loss!r}; write one of {', '.join(LOSSES)}.")
        if not is_whole_number(discriminator_updates):
            raise UserError(
                f"GenerativeAdversarial.discriminator_updates is {discriminator_updates!r}; write a whole number of at "
                "least 1."
            )
        self._of_discriminator, self._of_generator = LOSSES[loss]
        self._generator, self._discriminator = generator, discriminator
        self._updates = discriminator_updates

    @property
    def turns(self) -> Sequence[Turn]:
        first = [Turn(self._discriminator, [self._discriminator], index) for index in range(self._updates)]
        return [*first, Turn(self._generator, [self._generator], self._updates)]

    def bind(self, model: keras.Model, structure: Any) -> None:
        names = [layer.name for layer in model.layers]
        missing = [name for name in (self._generator, self._discriminator) if name not in names]
        if missing:
            raise UserError(
                f"GenerativeAdversarial takes a model with the layers {self._generator!r} and {self._discriminator!r}; "
                f"it has {names}, not {missing[0]!r}."
            )
        self.inputs(structure)
        draws = structure["noise"].shape[1]
        if draws < len(self.turns):
            raise UserError(
                f"The data gives {draws} draws of noise for each example, and a step has {len(self.turns)} updates. "
                f"Write drawn.WithNoise.draws = {len(self.turns)}."
            )

    def inputs(self, examples: Any) -> Any:
        if not isinstance(examples, Mapping) or set(examples) != {"examples", "noise"}:
            raise UserError(
                'GenerativeAdversarial learns from {"examples": x, "noise": z}; the data gives something else. Write '
                "@drawn.WithNoise around the data function."
            )
        noise = examples["noise"]
        first = tf.TensorSpec([None, noise.shape[2]], noise.dtype) if isinstance(noise, tf.TensorSpec) else noise[:, 0]
        return {"examples": examples["examples"], "noise": first}

    def terms_of(
        self, turn: Turn, model: keras.Model, examples: Any, *, training: bool
    ) -> tuple[dict[str, Term | WholeTerm], Any]:
        generate, judge = model.get_layer(self._generator), model.get_layer(self._discriminator)
        made = generate(examples["noise"][:, turn.index], training=training)
        if turn.name == self._generator:
            values = self._of_generator(_scores(judge(made, training=training)))
        else:
            real = _scores(judge(examples["examples"], training=training))
            values = self._of_discriminator(real, _scores(judge(tf.stop_gradient(made), training=training)))
        return {turn.name: Term(values)}, made

    def term_names(self) -> Sequence[str]:
        return self._discriminator, self._generator


def _scores(given: Any) -> tf.Tensor:
    """float32 [n]."""
    if given.shape.rank != 2 or given.shape[1] != 1:
        raise UserError(f"The discriminator must give one score an example, [n, 1]; it gives {given.shape.as_list()}.")
    return tf.cast(given[:, 0], tf.float32)
