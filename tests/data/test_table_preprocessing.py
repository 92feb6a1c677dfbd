"""A table's columns are encoded in an export as they are in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pytest
import tensorflow as tf

from tfdist.data.tables.table_encoding import Fitted, Rule, encode
from tfdist.data.tables.table_files import FLOAT, INTEGER, STRING
from tfdist.data.tables.table_preprocessing import encoder, raw_values

FITTED = Fitted({"c": ["blue", "red"], "n": [3, 7]}, {"x": 2.0, "y": -1.0}, {"x": 0.5, "y": 3.0})
CATEGORY: dict[str, Any] = {"name": "c", "kind": STRING, "is_category": True}
NUMBER: dict[str, Any] = {"name": "x", "kind": FLOAT}


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (Rule(**CATEGORY), ["red", "blue", "red"]),
        (Rule(**CATEGORY, unseen="category", missing="category"), ["red", None, "green", "blue"]),
        (Rule(**CATEGORY, unseen=1, missing="blue"), ["green", None, "blue"]),
        (Rule(**CATEGORY, missing="category"), [None, "blue"]),
        (Rule("n", INTEGER, is_category=True, unseen="category"), [7, 3, 9]),
        (Rule("c", STRING, is_text=True, missing="none"), ["a", None]),
        (Rule(**NUMBER), [1.5, 2.5]),
        (Rule(**NUMBER, missing="mean", is_standardized=True), [1.5, None, -4.0]),
        (Rule(**NUMBER, missing=9.0), [None, 0.25]),
        (Rule("y", INTEGER, is_float=True, is_standardized=True), [4, -7]),
        (Rule("n", INTEGER), [4, -7]),
    ],
)
def test_values_are_encoded_as_in_training(rule: Rule, values: list[Any]) -> None:
    expected = encode(rule, pyarrow.chunked_array([values]), FITTED, str)
    found = encoder(rule, FITTED, tf.Module())(tf.constant(raw_values(rule, values))).numpy()
    found = found.astype(str) if rule.is_text else found
    np.testing.assert_array_equal(found, expected.astype(str) if rule.is_text else expected)
    assert rule.is_text or found.dtype == expected.dtype


@pytest.mark.parametrize(
    ("rule", "values", "words"),
    [
        (Rule(**CATEGORY), ["green"], "'c' has no such value"),
        (Rule(**CATEGORY, unseen="category"), [None], "'c' has no such value"),
        (Rule(**NUMBER), [None], "'x' is missing"),
    ],
)
def test_what_training_refuses_is_refused(rule: Rule, values: list[Any], words: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        encoder(rule, FITTED, tf.Module())(tf.constant(raw_values(rule, values)))
