"""The encoding of a table's columns in TensorFlow's operations, for exports; `table_encoding.py` is what training uses.

Invariant: a value gets what training gives it. A missing number is not-a-number, a missing text is empty; where
training refuses a value, so does this, by InvalidArgumentError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.tables.table_encoding import ERROR, MEAN, OWN_CATEGORY, Fitted, Rule, vocabulary
from tfdist.data.tables.table_files import STRING


def raw_spec(rule: Rule) -> tf.TensorSpec:
    """How a program gives the column."""
    if rule.is_text or (rule.is_category and rule.kind == STRING):
        return tf.TensorSpec([None], tf.string, name=rule.name)
    return tf.TensorSpec([None], tf.int64 if rule.is_category else rule.dtype, name=rule.name)


def raw_values(rule: Rule, values: Sequence[Any]) -> np.ndarray:
    """A column's values, of which None is missing, as a program gives them."""
    spec = raw_spec(rule)
    if spec.dtype == tf.string:
        return np.array(["" if value is None else str(value) for value in values], dtype=object)
    missing = np.nan if spec.dtype.is_floating else rule.missing
    return np.array([missing if value is None else value for value in values], spec.dtype.as_numpy_dtype)


def encoder(rule: Rule, fitted: Fitted, tables: tf.Module) -> Callable[[tf.Tensor], tf.Tensor]:
    """From raw values to encoded ones, [n] each; `tables` holds what it looks values up in."""
    if rule.is_category:
        return _categories(rule, fitted, tables)
    if rule.is_text:
        return lambda values: _filled(rule, values, tf.equal(values, ""), tf.constant(str(rule.missing)))
    if rule.dtype == "int64":
        return lambda values: values

    def numbers(values: tf.Tensor) -> tf.Tensor:
        values = tf.cast(values, tf.float64)
        fill = fitted.means[rule.name] if rule.missing == MEAN else rule.missing
        fill = 0.0 if rule.missing == ERROR else fill
        values = _filled(rule, values, tf.math.is_nan(values), tf.constant(fill, tf.float64))
        if rule.is_standardized:
            values = (values - fitted.means[rule.name]) / fitted.deviations[rule.name]
        return tf.cast(values, rule.dtype)

    return numbers


def _filled(rule: Rule, values: tf.Tensor, is_missing: tf.Tensor, fill: tf.Tensor) -> tf.Tensor:
    if rule.missing != ERROR:
        return tf.where(is_missing, fill, values)
    with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(is_missing), [f"{rule.name!r} is missing"])]):
        return tf.identity(values)


def _categories(rule: Rule, fitted: Fitted, tables: tf.Module) -> Callable[[tf.Tensor], tf.Tensor]:
    known = list(vocabulary(rule, fitted))
    is_text = rule.kind == STRING
    keys = tf.constant(known, tf.string if is_text else tf.int64)
    entries = tf.lookup.KeyValueTensorInitializer(keys, tf.range(len(known), dtype=tf.int64))
    table = tf.lookup.StaticHashTable(entries, default_value=-1)
    setattr(tables, f"table_{rule.name}", table)
    own = len(known)  # the first index that no value has
    unseen = rule.unseen if isinstance(rule.unseen, int) else own if rule.unseen == OWN_CATEGORY else -1
    if rule.missing == OWN_CATEGORY:
        missing = own + (rule.unseen == OWN_CATEGORY)
    else:
        missing = known.index(rule.missing) if rule.missing in known else -1

    def categories(values: tf.Tensor) -> tf.Tensor:
        indices = table.lookup(values)
        indices = tf.where(indices < 0, tf.constant(unseen, tf.int64), indices)
        if is_text:
            indices = tf.where(tf.equal(values, ""), tf.constant(missing, tf.int64), indices)
        is_known = tf.debugging.Assert(tf.reduce_all(indices >= 0), [f"{rule.name!r} has no such value", values])
        with tf.control_dependencies([is_known]):
            return tf.cast(indices, tf.int32)

    return categories
