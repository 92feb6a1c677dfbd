"""Tables in Parquet and CSV files, held in memory: columns become inputs and targets, encoded alike in every split."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdist.data.formats.input_files import Patterns, find_files
from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Preprocessing, RandomAccessSource, load_or_fit
from tfdist.data.tables.table_encoding import (
    Encoder,
    Fitted,
    Rule,
    encode,
    fit,
    num_indices,
    raw_spec,
    raw_values,
    vocabulary,
)
from tfdist.data.tables.table_files import NULL_VALUES, TableFile, check_arrow, find_common_kinds, read_table
from tfdist.data.tables.table_rules import TableSettings, build_rules
from tfdist.errors import UserError
from tfdist.telemetry.records import build_damage_error

if TYPE_CHECKING:
    import pyarrow

FIT_VERSION = 1


class Table(RandomAccessSource):
    """Rows of Parquet files (`.parquet`) or of CSV files with a first row of names (`.csv`, `.tsv`), in memory.

    Numbers become float32, whole numbers int64, categories, which strings are, int32 indices. Example:

        TRAIN_DATA = @train/tables.Table
        EVAL_DATA = @test/tables.Table
        tables.Table.columns = @columns.Columns()
        tables.Table.fitted_on = %TRAIN_FILES
        train/tables.Table.files = %TRAIN_FILES
        test/tables.Table.files = 'data/test-*.parquet'

    Args:
      files: a path or pattern, local or gs://, or a list of them.
      columns: which columns are inputs, targets, weights.
      fitted_on: the training files, from which vocabularies, means and deviations are taken; all splits name the same
        ones. Needed where there is something to fit.
      categories: columns of whole numbers that are categories too.
      vocabularies: by column, the values of a category in the order of their indices; not fitted then.
      unseen: of input categories, what is done with a value that is not in the vocabulary: "error", or "category"
        (the index after the last). In a target it is an error always.
      missing: what is done with a missing value (of numbers, not-a-number too): "error", "mean", "category" (the index
        after the last, and after that of `unseen`), a number; for all inputs that it fits, or by column in a dict,
        where it can also be a value of the category. Targets and weights need an entry in a dict.
      standardize: input columns that are shifted and scaled to mean 0 and variance 1 over the fitted rows; True means
        all that are numbers.
      stack_inputs: makes one float32 matrix [n, number of inputs] of the inputs.
      delimiter: between the values of a CSV file; None takes a tab for .tsv and a comma for others.
      null_values: what a missing value looks like in a CSV file, unless in quotes.

    Raises:
      UserError: files or columns are missing, contradict each other, or cannot be done what is asked with.
    """

    def __init__(
        self,
        *,
        files: Patterns,
        columns: Columns,
        fitted_on: Patterns | None = None,
        categories: Sequence[str] = (),
        vocabularies: Mapping[str, Sequence[Any]] | None = None,
        unseen: str = "error",
        missing: Any = "error",
        standardize: bool | Sequence[str] = False,
        stack_inputs: bool = False,
        delimiter: str | None = None,
        null_values: Sequence[str] = NULL_VALUES,
    ) -> None:
        check_arrow()
        self._columns = columns
        self._stack = stack_inputs
        read = functools.partial(_read_tables, columns, delimiter=delimiter, null_values=null_values)
        self._tables = read(files, "Table.files")
        self._starts = [0, *itertools.accumulate(table.rows.num_rows for table in self._tables)]
        self.num_examples = self._starts[-1]
        if not self.num_examples:
            raise UserError(f"The table {files!r} has no rows, in {len(self._tables)} files.", error_id="no-examples")
        self._fit_tables = self._tables if fitted_on == files else []
        if fitted_on is not None and fitted_on != files:
            self._fit_tables = read(fitted_on, "Table.fitted_on")
        self._kinds = _find_kinds(self._fit_tables, self._tables, columns.names)
        settings = TableSettings(columns, categories, vocabularies or {}, unseen, missing, standardize, stack_inputs)
        self._rules = build_rules(settings, self._kinds)
        self._fitted_on = fitted_on
        self._fitted: Fitted | None = None
        self._arrays: ArraySource | None = None
        if fitted_on is None and self._rules_to_fit:
            raise UserError(
                f"The columns {[rule.name for rule in self._rules_to_fit]} are encoded by what the training rows hold. "
                f"Write Table.fitted_on = the training files, in every split; for training itself that is {files!r}."
            )
        specs = {name: tf.TensorSpec([None], rule.dtype) for name, rule in self._rules.items()}
        self.structure = self._nest(specs, lambda inputs: tf.TensorSpec([None, len(inputs)], tf.float32))

    @property
    def _rules_to_fit(self) -> list[Rule]:
        return [rule for rule in self._rules.values() if rule.needs_vocabulary or rule.needs_moments]

    @property
    def fitted(self) -> Fitted:
        """The fitted values; fitted the first time, unless `prepare` loaded them."""
        if self._fitted is None:
            names = [rule.name for rule in self._rules_to_fit]
            self._fitted = fit(self._rules_to_fit, _join(self._fit_tables, names)) if names else Fitted()
        return self._fitted

    def prepare(self, directory: str) -> None:
        """Takes what was fitted from `directory`, where the first who comes leaves it: one fit serves a whole run."""
        if not self._rules_to_fit:
            return
        settings = [FIT_VERSION, self._fitted_on, [dataclasses.astuple(rule) for rule in self._rules_to_fit]]
        path, fitted = load_or_fit(directory, "table", settings, Fitted, lambda: self.fitted)
        if lacking := [rule.name for rule in self._rules_to_fit if not fitted.has_all_of(rule)]:
            raise build_damage_error(path, f"it lacks what was fitted to {lacking}")
        self._fitted, self._arrays = fitted, None

    def arrays_in_memory(self) -> Any:
        """The encoded columns."""
        return self._encode_columns.arrays_in_memory()

    def gatherer(self) -> Callable[[tf.Tensor], Any]:
        """Gathers encoded rows."""
        return self._encode_columns.gatherer()

    def describe(self) -> list[str]:
        """Describes the encoding of each column."""
        lines = [f"{len(self._tables)} files, {self.num_examples:,} rows in memory"]
        for name, rule in self._rules.items():
            missing = sum(table.rows[name].null_count for table in self._tables if table.kinds)
            what = f"{name}: {rule.kind} → {rule.dtype}, {missing:,} missing ({rule.missing})"
            if rule.is_category:
                known = [str(value) for value in vocabulary(rule, self.fitted)]
                shown = ", ".join(known[:6]) + (", …" if len(known) > 6 else "")
                what += f", indices 0 … {num_indices(rule, self.fitted) - 1} of {len(known)} values: {shown}"
            if rule.is_standardized:
                what += f", mean {self.fitted.means[name]:.4g}, deviation {self.fitted.deviations[name]:.4g}"
            lines.append(what)
        return lines

    def preprocessing(self) -> Preprocessing:
        """Encodes columns as training does."""
        tables, names = tf.Module(), self._columns.input_names
        encoders = {name: Encoder(self._rules[name], self.fitted, tables) for name in names}

        def encode_row(raw: Mapping[str, tf.Tensor]) -> Any:
            columns = {name: encoders[name](raw[name]) for name in names}
            if self._stack:
                return tf.stack([tf.cast(each, tf.float32) for each in columns.values()], axis=1)
            return self._columns.select_inputs(columns)

        def first(count: int) -> dict[str, np.ndarray]:
            rows = _join(self._tables, names).slice(0, count)
            return {name: raw_values(self._rules[name], rows[name]) for name in names}

        specs = {name: raw_spec(self._rules[name]) for name in names}
        return Preprocessing(specs, encode_row, tables, first)

    @functools.cached_property
    def _rows(self) -> pyarrow.Table:
        return _join(self._tables, self._columns.names)

    @property
    def _encode_columns(self) -> ArraySource:
        if self._arrays is None:
            encoded = {
                name: encode(rule, self._rows[name], self.fitted, self._describe_row)
                for name, rule in self._rules.items()
            }
            self._arrays = ArraySource(self._nest(encoded, lambda inputs: np.stack(list(inputs.values()), axis=1)))
        return self._arrays

    def _describe_row(self, row: int) -> str:
        table = bisect.bisect_right(self._starts, row) - 1
        return f"{self._tables[table].path}, row {row - self._starts[table] + 1}"

    def _nest(self, columns: Mapping[str, Any], stack: Any) -> Any:
        """The nest of an example; `stack` makes one of the inputs where that is asked for."""
        x, *rest = self._columns.select(columns)
        if self._stack:
            x = stack({name: columns[name] for name in self._columns.input_names})
        return (x, *rest)


def _read_tables(columns: Columns, patterns: Patterns, setting: str, **form: Any) -> list[TableFile]:
    """The tables, each of which has the columns, unless it is quite empty."""
    tables = [read_table(file, columns.names, **form) for file in find_files(patterns, setting)]
    for table in tables:
        if table.kinds:
            columns.check(list(table.kinds), table.path)
    return tables


def _join(tables: Sequence[TableFile], names: Sequence[str]) -> pyarrow.Table:
    import pyarrow

    parts = [table.rows.select(list(names)) for table in tables if table.kinds]
    return pyarrow.concat_tables(parts, promote_options="permissive").unify_dictionaries()


def _find_kinds(fitted: Sequence[TableFile], tables: Sequence[TableFile], names: Sequence[str]) -> dict[str, str]:
    """The kinds of the columns: those of the training files, or splits would differ in their types."""
    everywhere = find_common_kinds([*fitted, *tables], names)
    if not fitted:
        return everywhere
    counted = find_common_kinds(fitted, names)
    for name, kind in counted.items():
        if everywhere[name] != kind:
            raise UserError(
                f"The column {name!r} holds {everywhere[name]} in {tables[0].path}, but {kind} in the training "
                f"files, {fitted[0].path} and so on. Write the same type in all."
            )
    return counted
