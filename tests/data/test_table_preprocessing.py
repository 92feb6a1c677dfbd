"""A table's columns are encoded in an export as they are in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pytest
import tensorflow as tf

from tfdist.data.tables.table_encoding import Encoder, Fitted, Rule, encode, raw_values
from tfdist.data.tables.table_files import FLOAT, INTEGER, STRING

FITTED = Fitted({"c": ["blue", "red"], "n": [3, 7]}, {"x": 2.0, "y": -1.0}, {"x": 0.5, "y": 3.0})
CATEGORY: dict[str, Any] = {"name": "c", "kind": STRING, "is_category": True}
NUMBER: dict[str, Any] = {"name": "x", "kind": FLOAT}


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (Rule(**CATEGORY), ["red", "blue", "red"], [1, 0, 1]),
        (Rule(**CATEGORY, unseen="category", missing="category"), ["red", None, "green", "blue"], [1, 3, 2, 0]),
        (Rule(**CATEGORY, unseen=1, missing="blue"), ["green", None, "blue"], [1, 0, 0]),
        (Rule(**CATEGORY, missing="category"), [None, "blue"], [2, 0]),
        (Rule("n", INTEGER, is_category=True, unseen="category"), [7, 3, 9], [1, 0, 2]),
        (Rule("c", STRING, is_text=True, missing="none"), ["a", None], [b"a", b"none"]),
        (Rule(**NUMBER), [1.5, 2.5], [1.5, 2.5]),
        (Rule(**NUMBER, missing="mean", is_standardized=True), [1.5, None, -4.0], [-1.0, 0.0, -12.0]),
        (Rule(**NUMBER, missing=9.0), [None, 0.25], [9.0, 0.25]),
        (Rule("y", INTEGER, is_float=True, is_standardized=True), [4, -7], [np.float32(5 / 3), -2.0]),
        (Rule("n", INTEGER), [4, -7], [4, -7]),
    ],
)
def test_values_are_encoded_as_in_training(rule: Rule, values: list[Any], expected: list[Any]) -> None:
    column = pyarrow.chunked_array([values])
    trained = encode(rule, column, FITTED, str)
    exported = Encoder(rule, FITTED, tf.Module())(tf.constant(raw_values(rule, column))).numpy()
    assert trained.tolist() == exported.tolist() == expected and trained.dtype == exported.dtype


@pytest.mark.parametrize(
    ("rule", "values", "words"),
    [
        (Rule(**CATEGORY), ["green"], "'c' is missing, or has a value"),
        (Rule(**CATEGORY, unseen="category"), [None], "'c' is missing, or has a value"),
        (Rule(**NUMBER), [None], "'x' is missing"),
    ],
)
def test_what_training_refuses_is_refused(rule: Rule, values: list[Any], words: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        Encoder(rule, FITTED, tf.Module())(tf.constant(raw_values(rule, pyarrow.chunked_array([values]))))
