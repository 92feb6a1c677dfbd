"""A user's own experiment: how far diabetes will have progressed in a year, and how sure that is.

Everything here is plain Keras and NumPy, and nothing imports tfdist: diabetes.gin names these functions.
"""

import keras
import numpy as np
from sklearn.datasets import load_diabetes


def load_patients(*, split):
    """442 patients: ten measurements float32 [n, 10], and the progression after a year, in hundreds, float32 [n].

    Every fifth patient is for testing.
    """
    data = load_diabetes()
    x = (data.data / data.data.std(axis=0)).astype(np.float32)
    y = (data.target / 100).astype(np.float32)
    is_test = np.arange(len(x)) % 5 == 0
    chosen = is_test if split == "test" else ~is_test
    return x[chosen], y[chosen]


def build_model(*, hidden_units=(32, 32), num_quantiles=3):
    """Ten measurements to the low, the middle and the high estimate."""
    inputs = keras.Input((10,))
    x = inputs
    for units in hidden_units:
        x = keras.layers.Dense(units, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(num_quantiles)(x), name="quantiles")


def quantile_loss(y_true, y_pred, quantiles=(0.1, 0.5, 0.9)):
    """The pinball loss of each patient, [n]: least when a share q of all patients lies below estimate q."""
    error = y_true[:, None] - y_pred
    q = np.array(quantiles, np.float32)
    return keras.ops.mean(keras.ops.maximum(q * error, (q - 1) * error), axis=-1)


def build_coverage():
    """A metric: the share of patients between the low and the high estimate; 0.8 would be right."""
    return keras.metrics.MeanMetricWrapper(_is_between, name="coverage")


def _is_between(y_true, y_pred):
    between = (y_true >= y_pred[:, 0]) & (y_true <= y_pred[:, -1])
    return keras.ops.cast(between, "float32")
