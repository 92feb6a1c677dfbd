"""The features of `tf.train.Example` records, as `tf.io` describes them, read as dense tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import UserError

KINDS = (
    tf.io.FixedLenFeature,
    tf.io.FixedLenSequenceFeature,
    tf.io.RaggedFeature,
    tf.io.SparseFeature,
    tf.io.VarLenFeature,
)
STORED_TYPES = {"float32": tf.float32, "int64": tf.int64, "string": tf.string}
EXAMPLE = "@tf.io.FixedLenFeature(shape=(8, 8, 1), dtype='float32'), with `import tensorflow as tf`"


def read_descriptions(descriptions: Any) -> dict[str, Any]:
    """The features with TensorFlow's types for names of types; raises UserError where one is not of `tf.io`."""
    if not isinstance(descriptions, Mapping) or not descriptions:
        raise UserError(
            f"features is a dict from names to features of tf.io; received {descriptions!r}. Write, for example, "
            f"features = {{'image': {EXAMPLE}}}."
        )
    found = {}
    for name, feature in descriptions.items():
        if not isinstance(feature, KINDS):
            raise UserError(f"features[{name!r}] = {feature!r} is not a feature of tf.io. Write {EXAMPLE}.")
        stored = STORED_TYPES.get(getattr(feature.dtype, "name", feature.dtype))
        if stored is None:
            raise UserError(
                f"features[{name!r}].dtype is {feature.dtype!r}; records hold {', '.join(STORED_TYPES)}. Write one of "
                "them, and change the type in transforms."
            )
        found[name] = feature._replace(dtype=stored)
    return found


def parse(records: tf.Tensor, features: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """The features of a batch of serialized examples, string [n]; sparse and ragged ones are filled up with 0 or ''."""
    return {name: _dense(value) for name, value in tf.io.parse_example(records, features).items()}


def check_record(record: bytes, features: Mapping[str, Any], where: str) -> None:
    """Raises UserError where a record does not fit, so that a mistake shows before the first step."""
    try:
        parse(tf.constant([record]), features)
    except UnicodeDecodeError as error:  # the bytes of the record, which TensorFlow quotes
        raise UserError(f"{where} is not a tf.train.Example, which features describe. Write it again.") from error
    except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
        said = re.sub(r"{{.*?}}|Name: <unknown>,|\[Op:.*?\]", "", str(getattr(error, "message", error)))
        raise UserError(f"{where} does not fit features: {' '.join(said.split())}. Correct features.") from error


def _dense(value: Any) -> tf.Tensor:
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value)
    return value.to_tensor() if isinstance(value, tf.RaggedTensor) else value
