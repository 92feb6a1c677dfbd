"""Descriptions of `tf.train.Example` features as plain literals, and what they mean in TensorFlow.

    ('fixed', SHAPE, DTYPE)        the same number of values in every record; [n, *SHAPE]
    ('raw', SHAPE, DTYPE)          one string with the bytes of an array, little-endian; [n, *SHAPE]
    ('variable', DTYPE)            any number of values, padded with 0 or '' to the most in the batch; [n, longest]
    ('variable', DTYPE, LENGTH)    the same, padded or cut to LENGTH; [n, LENGTH]
    ('sparse', DTYPE, SIZE)        numbers in 0 … SIZE - 1, as 1s in a vector of 0s of that DTYPE; [n, SIZE]
    ('sparse', DTYPE, SIZE, NAME)  the same with the values of the feature NAME in place of the 1s

Records hold int64, float32 and strings; other numeric DTYPEs are made of these. A vector of 0s and 1s rather than a
`tf.SparseTensor`, because every Keras layer takes it and replicas can split it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.errors import UserError, is_whole_number, suggest

FORMS = {
    "fixed": "('fixed', SHAPE, DTYPE), such as ('fixed', (8, 8, 1), 'float32')",
    "raw": "('raw', SHAPE, DTYPE), such as ('raw', (8, 8, 1), 'uint8')",
    "variable": "('variable', DTYPE) or ('variable', DTYPE, LENGTH), such as ('variable', 'int64', 40)",
    "sparse": "('sparse', DTYPE, SIZE) or ('sparse', DTYPE, SIZE, NAME), such as ('sparse', 'float32', 1000)",
}


@dataclasses.dataclass(frozen=True)
class Feature:
    """One described feature.

    Attributes:
      stored: the type that the records hold.
      dtype: the type to give.
      shape: of a fixed or raw one.
      size: of a sparse one, or the length of a variable one.
      values: the feature with a sparse one's values.
    """

    kind: str
    stored: tf.DType
    dtype: tf.DType
    shape: tuple[int, ...] = ()
    size: int | None = None
    values: str | None = None


def read_descriptions(descriptions: Mapping[str, Any]) -> dict[str, Feature]:
    """Raises UserError where one is not of the forms above."""
    if not isinstance(descriptions, Mapping) or not descriptions:
        raise UserError(
            f"features is a dict from names to descriptions; received {descriptions!r}. Write, for example, "
            "features = {'image': ('fixed', (8, 8, 1), 'float32'), 'label': ('fixed', (), 'int64')}."
        )
    return {name: _read(name, description) for name, description in descriptions.items()}


def _read(name: str, description: Any) -> Feature:
    kind = description[0] if isinstance(description, (tuple, list)) and description else description
    form = FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        raise UserError(
            f"features[{name!r}] = {description!r} is no description.{suggest(str(kind), FORMS)} Write one of: "
            f"{'; '.join(FORMS.values())}."
        )
    wrong = UserError(f"features[{name!r}] = {description!r} is not of the form {form}.")
    match tuple(description[1:]):
        case (shape, dtype) if kind in ("fixed", "raw") and _is_shape(shape):
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            stored = tf.string if kind == "raw" else _stored(dtype, wrong)
            return Feature(kind, stored, _dtype(dtype, wrong), shape=shape)
        case (dtype, *rest) if kind == "variable" and (not rest or (len(rest) == 1 and is_whole_number(rest[0]))):
            return Feature(kind, _stored(dtype, wrong), _dtype(dtype, wrong), size=rest[0] if rest else None)
        case (dtype, int(size), *rest) if kind == "sparse" and size > 0 and all(isinstance(r, str) for r in rest[:1]):
            if len(rest) <= 1 and _dtype(dtype, wrong) != tf.string:
                return Feature(kind, tf.int64, _dtype(dtype, wrong), size=size, values=rest[0] if rest else None)
    raise wrong


def _is_shape(shape: Any) -> bool:
    sizes = (shape,) if isinstance(shape, int) else shape
    return isinstance(sizes, (tuple, list)) and all(is_whole_number(size) for size in sizes)


def _dtype(dtype: Any, wrong: UserError) -> tf.DType:
    try:
        return tf.as_dtype(dtype)
    except TypeError as error:
        raise wrong from error


def _stored(dtype: Any, wrong: UserError) -> tf.DType:
    """What a record holds where `dtype` is to come out."""
    wanted = _dtype(dtype, wrong)
    if wanted == tf.string:
        return tf.string
    return tf.float32 if wanted.is_floating else tf.int64


def parse(records: tf.Tensor, features: Mapping[str, Feature]) -> dict[str, tf.Tensor]:
    """The features of a batch of serialized examples, string [n]."""
    specs: dict[str, Any] = {}
    for name, feature in features.items():
        if feature.kind == "fixed":
            specs[name] = tf.io.FixedLenFeature(feature.shape, feature.stored)
        elif feature.kind == "raw":
            specs[name] = tf.io.FixedLenFeature((), tf.string)
        else:
            specs[name] = tf.io.RaggedFeature(feature.stored, row_splits_dtype=tf.int64)
        if feature.values is not None and feature.values not in features:
            specs[feature.values] = tf.io.RaggedFeature(tf.float32, row_splits_dtype=tf.int64)
    parsed = tf.io.parse_example(records, specs)
    return {name: _finish(name, feature, parsed) for name, feature in features.items()}


def _finish(name: str, feature: Feature, parsed: Mapping[str, Any]) -> tf.Tensor:
    value = parsed[name]
    if feature.kind == "raw":
        value = tf.reshape(tf.io.decode_raw(value, feature.dtype), [-1, *feature.shape])
    elif feature.kind == "variable":
        value = value.to_tensor(shape=None if feature.size is None else [None, feature.size])
    elif feature.kind == "sparse":
        value = _vectors(name, feature, value, parsed)
    return value if value.dtype == feature.dtype else tf.cast(value, feature.dtype)


def _vectors(name: str, feature: Feature, numbers: tf.RaggedTensor, parsed: Mapping[str, Any]) -> tf.Tensor:
    flat = numbers.flat_values
    fits = tf.reduce_all((flat >= 0) & (flat < feature.size))
    with tf.control_dependencies([tf.debugging.Assert(fits, [f"the sparse feature {name!r}", flat])]):
        places = tf.stack([numbers.value_rowids(), flat], axis=1)
    shape = [numbers.nrows(), feature.size]
    if feature.values is None:
        ones = tf.ones(tf.shape(flat), feature.dtype)
        dense = tf.tensor_scatter_nd_update(tf.zeros(shape, feature.dtype), places, ones)
    else:
        dense = tf.scatter_nd(places, tf.cast(_flat(parsed[feature.values]), feature.dtype), shape)
    return tf.ensure_shape(dense, [None, feature.size])


def _flat(values: Any) -> tf.Tensor:
    return values.flat_values if isinstance(values, tf.RaggedTensor) else tf.reshape(values, [-1])


def check_record(record: bytes, features: Mapping[str, Feature], where: str) -> None:
    """Compares one record with the descriptions; raises UserError at the first that does not fit."""
    try:
        held = tf.train.Example.FromString(record).features.feature
    except Exception as error:  # protobuf's own class moved between its versions
        raise UserError(f"{where} is no tf.train.Example, which features describe.") from error
    for name, feature in features.items():
        if name not in held:
            if feature.kind in ("fixed", "raw"):
                raise UserError(f"{where} has no feature {name!r}; it has {sorted(held)}.{suggest(name, held)}")
            continue
        _check_feature(name, feature, held[name], where)


def _check_feature(name: str, feature: Feature, held: Any, where: str) -> None:
    kind = held.WhichOneof("kind")
    if kind is None:
        return
    count = len(getattr(held, kind).value)
    stored = {"bytes_list": "string", "float_list": "float32", "int64_list": "int64"}[kind]
    expected = math.prod(feature.shape) if feature.kind == "fixed" else 1
    if feature.kind == "sparse" and stored == "int64":
        outside = [number for number in held.int64_list.value if not 0 <= number < feature.size]
        if outside:
            assert feature.size is not None
            raise UserError(
                f"{where} holds {outside[0]} in the sparse feature {name!r}, outside 0 … {feature.size - 1}. "
                f"Give features[{name!r}] the SIZE {outside[0] + 1} or more."
                if outside[0] > 0
                else f"{where} holds {outside[0]} in the sparse feature {name!r}, whose numbers begin at 0."
            )
    elif feature.kind == "raw" and stored == "string" and count == 1:
        received, wanted = len(held.bytes_list.value[0]), math.prod(feature.shape) * feature.dtype.size
        if received != wanted:
            raise UserError(
                f"{where} holds {received:,} bytes in feature {name!r}; its description, {feature.dtype.name} "
                f"{list(feature.shape)}, needs {wanted:,}. Correct features[{name!r}]."
            )
    elif stored != feature.stored.name or (feature.kind in ("fixed", "raw") and count != expected):
        needs = f"{expected} value{'s' if expected != 1 else ''}" if feature.kind in ("fixed", "raw") else "values"
        raise UserError(
            f"{where} holds {count} value{'s' if count != 1 else ''} of {stored} in feature {name!r}; its description "
            f"needs {needs} of {feature.stored.name}. Correct features[{name!r}]."
        )
