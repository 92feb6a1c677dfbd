"""`class_weight` of `tfdist.fit` is the `sample_weight` that it stands for, whatever form the data has."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_fit.behaviors import X, Y, by_position, classifier, dataset
from keras_fit.test_behaviors import differences

import tfdist
from tfdist.tasks.losses import weigh_classes


def weights_after(model: keras.Model, *data: Any, **arguments: Any) -> list[np.ndarray]:
    tfdist.fit(model, *data, shuffle=False, verbose=0, batch_size=None if len(data) == 1 else 13, **arguments)
    return [np.asarray(each) for each in model.get_weights()]


@pytest.mark.slow
def test_a_class_that_is_not_named_weighs_one_in_a_dataset_as_in_arrays() -> None:
    expected = weights_after(classifier(), X, Y, class_weight={0: 2.0})
    assert not differences(expected, weights_after(classifier(), dataset(), class_weight={0: 2.0}))
    with pytest.raises(ValueError, match="cannot be given at the same time"):
        weights_after(classifier(), dataset().map(lambda x, y: (x, y, y)), class_weight={0: 2.0})


@pytest.mark.slow
def test_a_dataset_may_weigh_the_classes_of_positions() -> None:
    x, y = X[..., np.newaxis], np.arange(200).reshape(50, 4, 1) % 3
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(13)
    models = [by_position() for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    expected = weights_after(models[0], x, y, sample_weight=np.where(y == 1, 5.0, 1.0)[..., 0])
    assert not differences(expected, weights_after(models[1], batches, class_weight={1: 5.0}))


def test_a_table_of_weights_has_no_room_for_the_classes_between_them() -> None:
    labels = tf.constant([0, 10**9, 5, 0, -1], tf.int64)
    assert weigh_classes(labels, {0: 3.0, 10**9: 0.1}).numpy().tolist() == np.float32([3, 0.1, 1, 3, 1]).tolist()
