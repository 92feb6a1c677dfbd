"""Random transformations of images by Keras's own layers, each example's drawn from its own seed.

Invariant: what becomes of an example depends on the example and its seed alone, bit for bit, whatever batch, replica
or worker it is in. Every example goes through the layers by itself, and the generators of the layers are exchanged for
one that draws from the example's seed. Used by sources as their `augment`; runs inside tf.data, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UserError

LayerBuilder = Callable[[], keras.layers.Layer]

# They draw one example's change from the others of its batch, or with Python's generator while they are traced.
_REFUSED = {
    "MixUp": "mixes the examples of a batch",
    "CutMix": "mixes the examples of a batch",
    "AugMix": "draws its operations once for the whole run",
}


class Augmentation:
    """Keras layers in a row, applied to the images of `(x, y, …)`, x float or uint8 [n, height, width, channels].

    Args:
      builders: give the layers, such as `@keras.layers.RandomFlip` in a gin file, without parentheses.
      structure: of the examples; what comes out has the same shapes and types.

    Raises:
      UserError: a builder gives no layer, or one that cannot work on single examples; x is no image; a layer changes
        the shape.
    """

    def __init__(self, builders: Sequence[LayerBuilder], structure: Any) -> None:
        self._spec = structure[0] if isinstance(structure, tuple) else structure
        if not isinstance(self._spec, tf.TensorSpec) or self._spec.shape.rank != 4:
            raise UserError(
                "augmentation changes images, [height, width, channels] each; the inputs here are "
                f"{tf.nest.map_structure(lambda spec: spec.shape.as_list()[1:], self._spec)}."
            )
        self._draws = ExampleDraws()
        self.layers = [self._build_layer(builder) for builder in builders]

    def __call__(self, examples: Any, seeds: tf.Tensor) -> Any:
        images = examples[0] if isinstance(examples, tuple) else examples
        with tf.device("CPU"):
            changed = tf.map_fn(
                lambda one: self._transform(*one),
                (images, seeds),
                fn_output_signature=tf.TensorSpec(self._spec.shape[1:], self._spec.dtype),
            )
        return (changed, *examples[1:]) if isinstance(examples, tuple) else changed

    def _transform(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        changed = tf.cast(image, tf.float32)[tf.newaxis]
        self._draws.set_seed(seed)
        for layer in self.layers:
            changed = layer(changed, training=True)
        if not changed.shape[1:].is_compatible_with(self._spec.shape[1:]):
            raise UserError(
                f"The augmentation makes {changed.shape.as_list()[1:]} of images of {self._spec.shape.as_list()[1:]}. "
                "Layers that change the shape belong at the beginning of the model."
            )
        if self._spec.dtype.is_integer:
            changed = tf.round(tf.clip_by_value(changed, self._spec.dtype.min, self._spec.dtype.max))
        return tf.cast(changed[0], self._spec.dtype)

    def _build_layer(self, builder: LayerBuilder) -> keras.layers.Layer:
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float32")  # whatever the model computes in
        try:
            with tf.device("CPU"):
                layer = builder() if callable(builder) and not isinstance(builder, keras.layers.Layer) else builder
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(f"The augmentation layer {_builder_name(builder)} cannot be made: {error}") from error
        finally:
            keras.config.set_dtype_policy(policy)
        if not isinstance(layer, keras.layers.Layer):
            raise UserError(
                "augmentation is a list of builders of Keras layers, such as [@keras.layers.RandomFlip]; received "
                f"{_builder_name(builder)}, which gives {type(layer).__name__}."
            )
        for each in layer._flatten_layers():
            if type(each).__name__ in _REFUSED:
                name = type(each).__name__
                raise UserError(
                    f"{name} {_REFUSED[name]}, so that what becomes of an example would depend on more than the "
                    "example. Leave it out of the augmentation; the model may begin with it."
                )
            generators = [name for name, value in vars(each).items() if isinstance(value, keras.random.SeedGenerator)]
            vars(each).update(dict.fromkeys(generators, self._draws))  # past Keras's tracking, which wants a variable
        return layer


class ExampleDraws(keras.random.SeedGenerator):
    """A generator without a state: the seeds it gives are the example's own, folded with the number of the draw."""

    def __init__(self) -> None:  # its variable is what it does without
        self._seed: tf.Tensor | None = None
        self._count = 0

    def set_seed(self, seed: tf.Tensor) -> None:
        """Draws from int32 [2] `seed` from now on. Called while the function of one example is traced."""
        self._seed, self._count = seed, 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Folds the number of the draw into the example's seed."""
        del ordered
        self._count += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._count)


def _builder_name(builder: Any) -> str:
    return getattr(builder, "__name__", repr(builder)[:60])
