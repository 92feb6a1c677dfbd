"""Encoding of a table's columns into tensors, and what of it is fitted to the training rows.

Invariant: what was fitted is a function of the fitted files and the rules alone, so that every split and every worker
encodes alike, and an export does what training did: both call `Encoder`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdist.data.tables.table_files import FLOAT, STRING
from tfdist.errors import UserError, shorten_list

if TYPE_CHECKING:
    import pyarrow

ERROR, MEAN, CATEGORY = "error", "mean", "category"
NUMBER_FILL = "'mean', or the number to fill in"
MAX_SHOWN = 8  # values in a message
FindPlace = Callable[[int], str]  # from the number of a row to where it is


@dataclasses.dataclass(frozen=True)
class Rule:
    """The encoding of one column.

    Attributes:
      name: of the column.
      kind: what it holds, of `table_files`.
      is_category: its values become indices into a vocabulary.
      is_float: its numbers become float32, whatever they are stored as.
      vocabulary: given by the user; None takes the sorted values of the fitted rows.
      missing: "error", "mean", "category" (an index of its own), or the value to fill in.
      unseen: for a value that is not in the vocabulary: "error", or "category" (an index of its own).
      is_standardized: the mean is subtracted, and the rest divided by the standard deviation, of the fitted rows.
    """

    name: str
    kind: str
    is_category: bool = False
    is_float: bool = False
    vocabulary: tuple[Any, ...] | None = None
    missing: Any = ERROR
    unseen: str = ERROR
    is_standardized: bool = False

    @property
    def dtype(self) -> str:
        """The tensor's type, by TensorFlow's name."""
        if self.is_category:
            return "int32"
        whole_fill = self.missing == ERROR or isinstance(self.missing, int)
        return "float32" if self.kind == FLOAT or self.is_float or self.is_standardized or not whole_fill else "int64"

    @property
    def needs_vocabulary(self) -> bool:
        """True where the training rows give the vocabulary."""
        return self.is_category and self.vocabulary is None

    @property
    def needs_moments(self) -> bool:
        """True where mean and deviation of the training rows are used."""
        return self.is_standardized or self.missing == MEAN


@dataclasses.dataclass(frozen=True)
class FittedColumns:
    """Fitted values of the training rows: vocabularies, means and standard deviations by column."""

    vocabularies: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    means: Mapping[str, float] = dataclasses.field(default_factory=dict)
    deviations: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def has_all_of(self, rule: Rule) -> bool:
        """Returns whether the fitted columns have all that a column's rule needs."""
        moments = rule.name in self.means and rule.name in self.deviations
        return (moments or not rule.needs_moments) and (rule.name in self.vocabularies or not rule.needs_vocabulary)


def fit(rules: Sequence[Rule], rows: pyarrow.Table) -> FittedColumns:
    """Takes vocabularies, and means and standard deviations in float64, from the rows.

    Raises:
      UserError: a column has no value in any row.
    """
    categories = [rule for rule in rules if rule.needs_vocabulary]
    values = {rule.name: _to_keys(rule, rows[rule.name]).unique().drop_null() for rule in categories}
    numbers = {rule.name: _to_numbers(rows[rule.name]) for rule in rules if rule.needs_moments}
    numbers = {name: held[~np.isnan(held)] for name, held in numbers.items()}
    empty = [name for name, held in (values | numbers).items() if not len(held)]
    if empty:
        raise UserError(f"Nothing can be fitted on the columns {empty}: no row has a value there.")
    return FittedColumns(
        vocabularies={name: sorted(held.to_pylist()) for name, held in values.items()},
        means={name: float(held.mean()) for name, held in numbers.items()},
        deviations={name: float(held.std()) or 1.0 for name, held in numbers.items()},
    )


def encode(rule: Rule, column: pyarrow.ChunkedArray, fitted: FittedColumns, describe_row: FindPlace) -> np.ndarray:
    """[n] values of a column, as `Encoder` gives them to a program; `describe_row` names a row.

    Raises:
      UserError: a value is missing or unseen and the rule gives it no place.
    """
    is_missing = column.is_null().to_numpy()
    if not rule.is_category and rule.dtype != "int64":
        raw = _to_numbers(column)  # of which float32 would lose digits before they are standardized
        is_missing = np.isnan(raw)
    elif rule.kind == STRING:
        raw = raw_values(rule, column)
    else:
        raw = _to_integers(rule, column)
    encoded = Encoder(rule, fitted).encode(tf.constant(raw), tf.constant(is_missing))
    values, is_refused = (t.numpy() for t in encoded)
    if is_refused.any():
        row = int(np.nonzero(is_refused)[0][0])
        where = f"{describe_row(row)}: {rule.name!r} is"
        if is_missing[row]:
            fill = "'category' for an index of its own, or one of its values" if rule.is_category else NUMBER_FILL
            raise UserError(
                f"{where} missing. Write tfdist.Table.missing = {{{rule.name!r}: …}} with {fill}, or leave the row out "
                "of the file."
            )
        known = list(map(repr, vocabulary(rule, fitted)))
        shown = ", ".join(shorten_list(known, MAX_SHOWN))
        raise UserError(
            f"{where} {raw[row]!r}, which is not among its {len(known)} values {shown}. Write "
            "tfdist.Table.unseen = 'category' for an index of its own."
        )
    return values


def raw_spec(rule: Rule) -> tf.TensorSpec:
    """The spec of the column as a program gives it: of whole numbers, float64 where one may be missing."""
    whole = tf.int64 if rule.missing == ERROR else tf.float64
    dtype = tf.string if rule.kind == STRING else tf.float32 if rule.dtype == "float32" else whole
    return tf.TensorSpec([None], dtype, name=rule.name)


def raw_values(rule: Rule, column: Any) -> np.ndarray:
    """A column's values as a program gives them: a missing number is not-a-number, a missing text is empty."""
    dtype = raw_spec(rule).dtype
    if dtype == tf.string:
        return np.array(_to_keys(rule, column).fill_null("").to_pylist(), dtype=object)
    if dtype == tf.int64:
        return _to_integers(rule, column)
    return _to_numbers(column).astype(dtype.as_numpy_dtype)


class Encoder(tf.Module):
    """The encoding of one column in TensorFlow's operations, for training and for exports alike.

    It is a module, as an export has to keep the table that a category's values are looked up in.

    Args:
      rule: of the column.
      fitted: what the training rows say.
    """

    def __init__(self, rule: Rule, fitted: FittedColumns) -> None:
        super().__init__()
        self._rule = rule
        self._fitted = fitted
        if rule.is_category:
            known = list(vocabulary(rule, fitted))
            is_text = rule.kind == STRING
            keys = tf.constant(known if is_text else list(map(int, known)), tf.string if is_text else tf.int64)
            entries = tf.lookup.KeyValueTensorInitializer(keys, tf.range(len(known), dtype=tf.int64))
            self._table = tf.lookup.StaticHashTable(entries, default_value=-1)

    def __call__(self, values: tf.Tensor) -> tf.Tensor:
        """Encodes what a program gives, [n]; raises InvalidArgumentError for a value that training refuses."""
        is_missing = tf.zeros(tf.shape(values), tf.bool)
        if values.dtype == tf.string:
            is_value = "" in vocabulary(self._rule, self._fitted)
            is_missing = is_missing if is_value else tf.equal(values, "")
        elif values.dtype.is_floating:
            is_missing = tf.math.is_nan(values)
            if self._rule.dtype != "float32":
                values = tf.cast(tf.where(is_missing, tf.zeros_like(values), values), tf.int64)
        encoded, is_refused = self.encode(values, is_missing)
        words = [f"{self._rule.name!r} is missing, or has a value that training does not know:", values]
        with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(is_refused), words)]):
            return tf.identity(encoded)

    def encode(self, values: tf.Tensor, is_missing: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The encoded values, [n], and which of them the rule has no place for, bool [n]."""
        rule = self._rule
        if rule.is_category:
            return self._encode_category(values, is_missing)
        refused = is_missing if rule.missing == ERROR else tf.zeros_like(is_missing)
        fill = self._fitted.means[rule.name] if rule.missing == MEAN else rule.missing
        fill = 0 if rule.missing == ERROR else fill
        if rule.dtype == "int64":
            return tf.where(is_missing, tf.constant(fill, tf.int64), values), refused
        numbers = tf.cast(values, tf.float64)
        numbers = tf.where(is_missing, tf.constant(fill, tf.float64), numbers)
        if rule.is_standardized:
            numbers = (numbers - self._fitted.means[rule.name]) / self._fitted.deviations[rule.name]
        return tf.cast(numbers, rule.dtype), refused

    def _encode_category(self, values: tf.Tensor, is_missing: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rule = self._rule
        known = list(vocabulary(rule, self._fitted))
        own = len(known)  # the first index that no value has
        unseen = own if rule.unseen == CATEGORY else -1
        if rule.missing == CATEGORY:
            missing = own + (rule.unseen == CATEGORY)
        else:
            missing = known.index(rule.missing) if rule.missing in known else -1
        indices = self._table.lookup(values)
        indices = tf.where(indices < 0, tf.constant(unseen, tf.int64), indices)
        indices = tf.where(is_missing, tf.constant(missing, tf.int64), indices)
        return tf.cast(indices, tf.int32), indices < 0


def vocabulary(rule: Rule, fitted: FittedColumns) -> Sequence[Any]:
    """The values of a category in the order of their indices."""
    return fitted.vocabularies[rule.name] if rule.vocabulary is None else rule.vocabulary


def num_indices(rule: Rule, fitted: FittedColumns) -> int:
    """The number of indices that a category can have, 0 … n - 1, which an Embedding or a one-hot encoding needs."""
    return len(vocabulary(rule, fitted)) + (rule.unseen == CATEGORY) + (rule.missing == CATEGORY)


def _to_numbers(column: Any) -> np.ndarray:
    """float64 [n], NaN where a value is missing."""
    import pyarrow

    return np.asarray(column.cast(pyarrow.float64(), safe=False).to_numpy(), np.float64)  # whole numbers may be large


def _to_integers(rule: Rule, column: Any) -> np.ndarray:
    """int64 [n], 0 where a value is missing."""
    return _to_keys(rule, column).cast("int64").fill_null(0).to_numpy()


def _to_keys(rule: Rule, column: Any) -> Any:
    """A column in one piece, of strings, whole numbers or truth values."""
    import pyarrow
    from pyarrow import types

    kind = "int64" if types.is_integer(column.type) else "bool" if types.is_boolean(column.type) else "string"
    try:
        return column.cast(kind).combine_chunks()
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"The column {rule.name!r} holds whole numbers that int64 cannot: {error}. Write them as strings."
        ) from error
