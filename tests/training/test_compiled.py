"""What is taken from a compiled model is what Keras itself would train it with."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfdist.training.run.compiled import parts_of

STRUCTURE = (tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int32))


def test_a_metric_around_a_function_of_ones_own_is_made_again() -> None:
    def gap(y: tf.Tensor, p: tf.Tensor, power: int) -> tf.Tensor:
        return tf.abs(y - p)[:, 0] ** power

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanMetricWrapper(gap, "gap", power=2)])
    targets = tf.TensorSpec((None, 1), tf.float32)
    task = parts_of(None, lambda: model, None, None, (STRUCTURE[0], targets))[2]
    (made,) = (spec.build() for spec in task.metric_specs())
    made.update_state(np.zeros((2, 1)), np.full((2, 1), 3.0))
    assert made.name == "gap" and float(made.result()) == 9.0
