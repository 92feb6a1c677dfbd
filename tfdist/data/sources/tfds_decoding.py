"""From serialized examples of a TensorFlow data set to its features, a whole batch at a time where that can be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Of these one record holds one value of fixed shape, so that a batch is parsed at once. Features made of others, such
# as sequences, are decoded record by record.
PLAIN_FEATURES = ("Tensor", "Scalar", "ClassLabel", "Text", "Image", "LabeledImage", "BBoxFeature")


def batch_decoder(features: Any) -> Callable[[tf.Tensor], dict[str, Any]]:
    """A function from records, string [n], to a dict of batches, by the builder's own `features`."""
    if all(type(feature).__name__ in PLAIN_FEATURES for feature in features.values()):
        specs = features.tf_example_spec
        if set(specs) == set(features) and all(isinstance(spec, tf.io.FixedLenFeature) for spec in specs.values()):
            return lambda records: _decode_together(features, records)
    return lambda records: _decode_one_by_one(features, records)


def _decode_together(features: Any, records: tf.Tensor) -> dict[str, Any]:
    parsed = tf.io.parse_example(records, features.tf_example_spec)
    return {name: _decode_column(feature, parsed[name]) for name, feature in features.items()}


def _decode_column(feature: Any, values: tf.Tensor) -> tf.Tensor:
    serialized = feature.get_serialized_info()
    if values.dtype != serialized.tf_dtype:
        values = tf.cast(values, serialized.tf_dtype)
    decoded = feature.get_tensor_info()
    is_encoded = (serialized.tf_dtype, serialized.shape) != (decoded.tf_dtype, decoded.shape)
    if is_encoded and decoded.tf_dtype != tf.string:
        spec = tf.TensorSpec(decoded.shape, decoded.tf_dtype)
        values = tf.map_fn(feature.decode_example, values, fn_output_signature=spec, parallel_iterations=32)
    return tf.ensure_shape(values, [None, *decoded.shape])


def _decode_one_by_one(features: Any, records: tf.Tensor) -> dict[str, Any]:
    specs = tf.nest.map_structure(lambda info: tf.TensorSpec(info.shape, info.tf_dtype), features.get_tensor_info())
    return tf.map_fn(features.deserialize_example, records, fn_output_signature=specs, parallel_iterations=32)
