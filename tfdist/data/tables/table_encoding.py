"""How the values of a table's columns become tensors, and what of it is learned from the training rows.

Invariant: what was fitted is a function of the fitted files and the rules alone, so that every split and every worker
encodes alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.data.tables.table_files import FLOAT, STRING
from tfdist.errors import UserError

if TYPE_CHECKING:
    import pyarrow

ERROR, MEAN, OWN_CATEGORY = "error", "mean", "category"
Place = Callable[[int], str]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is done with one column.

    Attributes:
      name: of the column.
      kind: what it holds, of `table_files`.
      is_category: its values become indices into a vocabulary.
      is_text: its strings stay strings.
      is_float: its numbers become float32, whatever they are stored as.
      vocabulary: given by the user; None takes the sorted values of the fitted rows.
      missing: "error", "mean", "category" (an index of its own), or the value to fill in.
      unseen: for a value that is not in the vocabulary: "error", "category" (an index of its own), or an index.
      is_standardized: the mean is subtracted, and the rest divided by the standard deviation, of the fitted rows.
      num_classes: labels have to be below it; None does not look.
    """

    name: str
    kind: str
    is_category: bool = False
    is_text: bool = False
    is_float: bool = False
    vocabulary: tuple[Any, ...] | None = None
    missing: Any = ERROR
    unseen: str | int = ERROR
    is_standardized: bool = False
    num_classes: int | None = None

    @property
    def dtype(self) -> str:
        """Of the tensor, by TensorFlow's name."""
        if self.is_category:
            return "int32"
        if self.is_text:
            return "string"
        whole_fill = self.missing == ERROR or isinstance(self.missing, int)
        return "float32" if self.kind == FLOAT or self.is_float or self.is_standardized or not whole_fill else "int64"

    @property
    def needs_vocabulary(self) -> bool:
        return self.is_category and self.vocabulary is None

    @property
    def needs_moments(self) -> bool:
        return self.is_standardized or self.missing == MEAN


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What the training rows said: vocabularies, means and standard deviations by column."""

    vocabularies: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    means: Mapping[str, float] = dataclasses.field(default_factory=dict)
    deviations: Mapping[str, float] = dataclasses.field(default_factory=dict)


def fit(rules: Sequence[Rule], groups: Iterable[pyarrow.Table]) -> Fitted:
    """Goes through rows in their order once, accumulating in float64 (Chan, Golub, LeVeque 1983, formulas 2.1)."""
    vocabularies: dict[str, set[Any]] = {rule.name: set() for rule in rules if rule.needs_vocabulary}
    moments = {rule.name: (0, 0.0, 0.0) for rule in rules if rule.needs_moments}
    for group in groups:
        for name, values in vocabularies.items():
            values.update(_plain(group[name]).unique().drop_null().to_pylist())
        for name, before in moments.items():
            moments[name] = _with_rows(before, _numbers(group[name]))
    empty = [name for name, values in vocabularies.items() if not values]
    empty += [name for name, (count, _, _) in moments.items() if not count]
    if empty:
        raise UserError(f"Nothing can be fitted on the columns {empty}: no row has a value there.")
    return Fitted(
        vocabularies={name: sorted(values) for name, values in vocabularies.items()},
        means={name: mean for name, (_, mean, _) in moments.items()},
        deviations={name: math.sqrt(squares / count) or 1.0 for name, (count, _, squares) in moments.items()},
    )


def _with_rows(before: tuple[int, float, float], values: np.ndarray) -> tuple[int, float, float]:
    """Count, mean and sum of squared differences, with more values."""
    values = values[~np.isnan(values)]
    if not len(values):
        return before
    count, mean, squares = before
    new_mean = float(values.mean())
    total, apart = count + len(values), new_mean - mean
    squares += float(((values - new_mean) ** 2).sum()) + apart**2 * count * len(values) / total
    return total, mean + apart * len(values) / total, squares


def encode(rule: Rule, column: pyarrow.ChunkedArray, fitted: Fitted, place: Place) -> np.ndarray:
    """[n] values of a column; `place` says where a row is.

    Raises:
      UserError: a value is missing, unseen or out of range and the rule gives it no place.
    """
    if rule.is_category:
        values = _indices(rule, column, fitted, place)
    elif rule.is_text:
        values = _texts(rule, column, place)
    else:
        values = _filled(rule, column, fitted, place)
    if rule.num_classes is not None:
        wrong = np.nonzero((values < 0) | (values >= rule.num_classes) | (values != np.floor(values)))[0]
        if len(wrong):
            raise UserError(
                f"{place(int(wrong[0]))}: the label {rule.name!r} is {values[wrong[0]]}, but num_classes = "
                f"{rule.num_classes} allows 0 … {rule.num_classes - 1}."
            )
    return values.astype(object if rule.is_text else rule.dtype)


def vocabulary(rule: Rule, fitted: Fitted) -> Sequence[Any]:
    """The values of a category in the order of their indices."""
    return fitted.vocabularies[rule.name] if rule.vocabulary is None else rule.vocabulary


def num_indices(rule: Rule, fitted: Fitted) -> int:
    """How many indices a category can have, 0 … n - 1: what an Embedding or a one-hot encoding needs."""
    known = len(vocabulary(rule, fitted)) + (rule.unseen == OWN_CATEGORY) + (rule.missing == OWN_CATEGORY)
    return max(known, rule.unseen + 1) if isinstance(rule.unseen, int) else known


def _indices(rule: Rule, column: Any, fitted: Fitted, place: Place) -> np.ndarray:
    import pyarrow
    from pyarrow import compute

    known = vocabulary(rule, fitted)
    held = _plain(column)
    is_missing = held.is_null().to_numpy(zero_copy_only=False)
    found = compute.index_in(held, value_set=pyarrow.array(known, held.type))
    indices = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    unseen = np.nonzero((indices < 0) & ~is_missing)[0]
    if len(unseen) and rule.unseen == ERROR:
        raise UserError(
            f"{place(int(unseen[0]))}: {rule.name!r} is {held[int(unseen[0])].as_py()!r}, which is not among its "
            f"{len(known)} values {_some(known)}. Write Table.unseen = 'category' for an index of its own, or an index."
        )
    indices[unseen] = len(known) if rule.unseen == OWN_CATEGORY or rule.unseen == ERROR else rule.unseen
    if is_missing.any():
        if rule.missing == OWN_CATEGORY:
            fill = len(known) + (rule.unseen == OWN_CATEGORY)
        elif rule.missing in known:
            fill = list(known).index(rule.missing)
        else:
            raise _missing(rule, is_missing, place, "'category' for an index of its own, or one of its values")
        indices[is_missing] = fill
    return indices


def _texts(rule: Rule, column: Any, place: Place) -> np.ndarray:
    held = _plain(column)
    is_missing = held.is_null().to_numpy(zero_copy_only=False)
    if is_missing.any() and rule.missing == ERROR:
        raise _missing(rule, is_missing, place, "the text to fill in")
    return np.array(held.fill_null(str(rule.missing)).to_pylist(), dtype=object)


def _filled(rule: Rule, column: Any, fitted: Fitted, place: Place) -> np.ndarray:
    import pyarrow

    if rule.dtype == "int64":
        is_missing = column.is_null().combine_chunks().to_numpy(zero_copy_only=False)
        if is_missing.any() and rule.missing == ERROR:
            raise _missing(rule, is_missing, place, "'mean', or the number to fill in")
        whole = column.cast(pyarrow.int64()).combine_chunks()
        return (whole.fill_null(rule.missing) if is_missing.any() else whole).to_numpy(zero_copy_only=False)
    values = _numbers(column)
    is_missing = np.isnan(values)
    if is_missing.any():
        if rule.missing == ERROR:
            raise _missing(rule, is_missing, place, "'mean', or the number to fill in")
        values = np.where(is_missing, fitted.means[rule.name] if rule.missing == MEAN else rule.missing, values)
    if rule.is_standardized:
        values = (values - fitted.means[rule.name]) / fitted.deviations[rule.name]
    return values


def _missing(rule: Rule, is_missing: np.ndarray, place: Place, instead: str) -> UserError:
    return UserError(
        f"{place(int(np.nonzero(is_missing)[0][0]))}: {rule.name!r} is missing. Write Table.missing = "
        f"{{{rule.name!r}: …}} with {instead}, or leave the row out of the file."
    )


def _numbers(column: Any) -> np.ndarray:
    """float64 [n], NaN where a value is missing."""
    import pyarrow

    return np.asarray(column.cast(pyarrow.float64(), safe=False).to_numpy(), np.float64)  # whole numbers may be large


def _plain(column: Any) -> Any:
    """A column in one piece, of strings, whole numbers or truth values."""
    import pyarrow
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_integer(kind):
        kind = pyarrow.int64()
    elif not types.is_boolean(kind):
        kind = pyarrow.string()
    held = column.cast(kind)
    return held.combine_chunks() if hasattr(held, "combine_chunks") else held


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(repr(value) for value in values[:8])
    return f"{shown}, …" if len(values) > 8 else shown


def check_vocabulary(name: str, kind: str, given: Any) -> tuple[Any, ...]:
    """A vocabulary as it was given, if it can belong to such a column."""
    wanted = str if kind == STRING else int
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(value, wanted) for value in given):
        raise UserError(
            f"Table.vocabularies gives {given!r} for {name!r}, a column of {kind}. Write a list of "
            f"{'strings' if wanted is str else 'whole numbers'}."
        )
    if len(set(given)) != len(given):
        raise UserError(f"Table.vocabularies gives a value of {name!r} more than once: {list(given)}.")
    return tuple(given)
