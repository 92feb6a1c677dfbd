"""Tables in Parquet and CSV files, held in memory: columns become inputs and targets, encoded alike in every split."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdist.data.formats.input_files import Patterns, find_files
from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Order, Preprocessing, Reader, Source, load_or_fit
from tfdist.data.tables.table_encoding import (
    CATEGORY,
    ERROR,
    MEAN,
    Encoder,
    FittedColumns,
    Rule,
    encode,
    fit,
    num_indices,
    raw_spec,
    raw_values,
    vocabulary,
)
from tfdist.data.tables.table_files import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    NULL,
    NUMERIC,
    STRING,
    find_common_kinds,
    read_table,
)
from tfdist.errors import UserError, build_user_error, shorten_list, suggest
from tfdist.settings.checks import one_of
from tfdist.telemetry.records import build_damage_error

if TYPE_CHECKING:
    import pyarrow

FIT_VERSION = 1


class Table(Source):
    """Rows of Parquet files (`.parquet`) or of CSV files with a first row of names (`.csv`, `.tsv`), in memory.

    Numbers become float32, whole numbers int64, categories, which strings are, int32 indices. Example:

        train.train_data = @train/tables.Table
        train.eval_data = @test/tables.Table
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
    ) -> None:
        if delimiter is not None and not (isinstance(delimiter, str) and len(delimiter.encode()) == 1):
            raise UserError(f"Table.delimiter is one ASCII character, such as ';'; received {delimiter!r}.")
        self._columns = columns
        self._stack = stack_inputs

        def read(patterns: Patterns, setting: str) -> dict[str, pyarrow.Table]:
            return {f.path: read_table(f, columns, delimiter=delimiter) for f in find_files(patterns, setting)}

        self._tables = read(files, "Table.files")
        self._starts = [0, *itertools.accumulate(rows.num_rows for rows in self._tables.values())]
        self.num_examples = self._starts[-1]
        if not self.num_examples:
            raise build_user_error(
                f"The table {files!r} has no rows, in {len(self._tables)} files.", error_id="no-examples"
            )
        self._fit_tables = self._tables if fitted_on == files else {}
        if fitted_on is not None and fitted_on != files:
            self._fit_tables = read(fitted_on, "Table.fitted_on")
        self._kinds = _find_kinds(self._fit_tables, self._tables, columns.names)
        settings = _Settings(columns, categories, vocabularies or {}, unseen, missing, standardize, stack_inputs)
        self._rules = _build_rules(settings, self._kinds)
        self._fitted_on = fitted_on
        self._fitted: FittedColumns | None = None
        self._arrays: ArraySource | None = None
        if fitted_on is None and self._rules_to_fit:
            raise UserError(
                f"The columns {[rule.name for rule in self._rules_to_fit]} are encoded by what the training rows hold. "
                f"Write the training files in every split, for training itself tfdist.Table.fitted_on = {files!r}."
            )
        specs = {name: tf.TensorSpec([None], rule.dtype) for name, rule in self._rules.items()}
        self.structure = self._nest(specs, lambda inputs: tf.TensorSpec([None, len(inputs)], tf.float32))

    @property
    def _rules_to_fit(self) -> list[Rule]:
        return [rule for rule in self._rules.values() if rule.needs_vocabulary or rule.needs_moments]

    @property
    def fitted(self) -> FittedColumns:
        """The fitted values; fitted the first time, unless `prepare` loaded them."""
        if self._fitted is None:
            names = [rule.name for rule in self._rules_to_fit]
            self._fitted = fit(self._rules_to_fit, _join(self._fit_tables, names)) if names else FittedColumns()
        return self._fitted

    def prepare(self, directory: str) -> None:
        """Takes what was fitted from `directory`, where the first who comes leaves it: one fit serves a whole run."""
        if not self._rules_to_fit:
            return
        settings = [FIT_VERSION, self._fitted_on, [dataclasses.astuple(rule) for rule in self._rules_to_fit]]
        path, fitted = load_or_fit(directory, "table", settings, FittedColumns, lambda: self.fitted)
        if lacking := [rule.name for rule in self._rules_to_fit if not fitted.has_all_of(rule)]:
            raise build_damage_error(path, f"it lacks what was fitted to {lacking}")
        self._fitted, self._arrays = fitted, None

    def arrays_in_memory(self) -> Any:
        """The encoded columns."""
        return self._encode_columns.arrays_in_memory()

    def reader(self, order: Order) -> Reader:
        """Gathers encoded rows."""
        return self._encode_columns.reader(order)

    def describe(self) -> list[str]:
        """Describes the encoding of each column."""
        lines = [f"{len(self._tables)} files, {self.num_examples:,} rows in memory"]
        for name, rule in self._rules.items():
            missing = self._rows[name].null_count
            what = f"{name}: {rule.kind} → {rule.dtype}, {missing:,} missing ({rule.missing})"
            if rule.is_category:
                known = shorten_list(list(map(str, vocabulary(rule, self.fitted))), 6)
                what += f", indices 0 … {num_indices(rule, self.fitted) - 1} of the values {', '.join(known)}"
            if rule.is_standardized:
                what += f", mean {self.fitted.means[name]:.4g}, deviation {self.fitted.deviations[name]:.4g}"
            lines.append(what)
        return lines

    def preprocessing(self) -> Preprocessing:
        """Encodes columns as training does."""
        kept, names = tf.Module(), self._columns.input_names
        kept.encoders = encoders = {name: Encoder(self._rules[name], self.fitted) for name in names}

        def encode_row(raw: Mapping[str, tf.Tensor]) -> Any:
            columns = {name: encoders[name](raw[name]) for name in names}
            if self._stack:
                return tf.stack([tf.cast(each, tf.float32) for each in columns.values()], axis=1)
            return self._columns.select_inputs(columns)

        def first(count: int) -> dict[str, np.ndarray]:
            rows = self._rows.slice(0, count)
            return {name: raw_values(self._rules[name], rows[name]) for name in names}

        specs = {name: raw_spec(self._rules[name]) for name in names}
        return Preprocessing(specs, encode_row, kept, first)

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
        return f"{list(self._tables)[table]}, row {row - self._starts[table] + 1}"

    def _nest(self, columns: Mapping[str, Any], stack: Any) -> Any:
        """The nest of an example; `stack` makes one of the inputs where that is asked for."""
        x, *rest = self._columns.select(columns)
        if self._stack:
            x = stack({name: columns[name] for name in self._columns.input_names})
        return (x, *rest)


def _join(tables: Mapping[str, pyarrow.Table], names: Sequence[str]) -> pyarrow.Table:
    import pyarrow

    parts = [rows.select(list(names)) for rows in tables.values() if rows.num_columns]
    return pyarrow.concat_tables(parts, promote_options="permissive")


def _find_kinds(
    fitted: Mapping[str, pyarrow.Table], tables: Mapping[str, pyarrow.Table], names: Sequence[str]
) -> dict[str, str]:
    """The kinds of the columns: those of the training files, or splits would differ in their types."""
    everywhere = find_common_kinds({**fitted, **tables}, names)
    if not fitted:
        return everywhere
    counted = find_common_kinds(fitted, names)
    for name, kind in counted.items():
        if everywhere[name] != kind:
            raise UserError(
                f"The column {name!r} holds {everywhere[name]} in {next(iter(tables))}, but {kind} in the training "
                f"files, {next(iter(fitted))} and so on. Write the same type in all."
            )
    return counted


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The settings of a `Table` that decide how its columns are encoded; see there."""

    columns: Columns
    categories: Sequence[str]
    vocabularies: Mapping[str, Sequence[Any]]
    unseen: str
    missing: Any
    standardize: bool | Sequence[str]
    stack_inputs: bool


def _build_rules(settings: _Settings, kinds: Mapping[str, str]) -> dict[str, Rule]:
    """A rule for every column that is used, by name.

    Args:
      settings: of the table.
      kinds: what the columns hold.

    Raises:
      UserError: a setting names a column that is not used, or cannot be done with what a column holds.
    """
    inputs = settings.columns.input_names
    named: dict[str, Any] = {
        "categories": settings.categories,
        "vocabularies": settings.vocabularies,
        "missing": settings.missing if isinstance(settings.missing, Mapping) else (),
        "standardize": () if isinstance(settings.standardize, bool) else settings.standardize,
    }
    for setting, names in named.items():
        if not isinstance(names, list | tuple | Mapping):
            raise UserError(f"Table.{setting} is {names!r}; write the names of columns in a list.")
        for name in names:
            if name not in settings.columns.names:
                raise UserError(
                    f"Table.{setting} names {name!r}, which is no column in use: {settings.columns.names}."
                    f"{suggest(name, settings.columns.names)}"
                )
    one_of(ERROR, CATEGORY)("Table.unseen", settings.unseen)
    rules = {name: _build_rule(name, kinds[name], settings) for name in settings.columns.names}
    if settings.stack_inputs:
        apart = [name for name in inputs if rules[name].is_category]
        if apart:
            raise UserError(
                f"Table.stack_inputs makes one matrix of numbers, but the inputs {apart} hold categories. "
                "Write tfdist.Table.stack_inputs = False, and a model that takes a dict of inputs."
            )
    return rules


def _build_rule(name: str, kind: str, settings: _Settings) -> Rule:
    if kind not in (*NUMERIC, STRING, NULL):
        raise UserError(
            f"The column {name!r} is of the type {kind}, which a table cannot hold. Write numbers, strings or truth "
            "values, or leave it out of Columns."
        )
    if kind == NULL:
        raise UserError(f"The column {name!r} has no value in any row. Leave it out of Columns.")
    is_input = name in settings.columns.input_names
    is_category = kind == STRING or name in settings.categories or name in settings.vocabularies
    if is_category and kind == FLOAT:
        raise UserError(
            f"The column {name!r} holds {kind}, which are no categories. Write them as whole numbers or strings."
        )
    if name == settings.columns.weights and kind not in NUMERIC:
        raise UserError(f"The weights' column {name!r} holds {kind}; weights are numbers.")
    given = settings.vocabularies.get(name)
    return Rule(
        name=name,
        kind=kind,
        is_category=is_category,
        is_float=not is_category and ((settings.stack_inputs and is_input) or name == settings.columns.weights),
        vocabulary=None if given is None else _check_vocabulary(name, kind, given),
        missing=_find_fill(name, settings, is_category=is_category, is_input=is_input),
        unseen=settings.unseen if is_input else ERROR,
        is_standardized=_check_standardized(name, kind, settings, is_number=not is_category, is_input=is_input),
    )


def _find_fill(name: str, settings: _Settings, *, is_category: bool, is_input: bool) -> Any:
    """The value that fills a column's gaps. A setting for all columns counts for the inputs that it makes sense for."""
    said = settings.missing
    by_name = isinstance(said, Mapping)
    wanted = said.get(name, ERROR) if by_name else said
    if isinstance(wanted, bool) or not isinstance(wanted, (str, int, float)):
        raise UserError(f"Table.missing is {wanted!r} for {name!r}; write 'error', 'mean', 'category' or a value.")
    is_number = isinstance(wanted, (int, float)) or wanted == MEAN
    fits = wanted == ERROR or (wanted != MEAN if is_category else is_number)
    if by_name and not fits:
        instead = "'category' or one of its values" if is_category else "'mean' or a number"
        raise UserError(f"Table.missing is {wanted!r} for {name!r}; there write 'error', {instead}.")
    if not by_name and not isinstance(wanted, (int, float)) and wanted not in (ERROR, MEAN, CATEGORY):
        raise UserError(
            f"Table.missing is {wanted!r}; write 'error', 'mean', 'category', a number, or a dict by column."
        )
    applies = by_name or (is_input and (wanted == CATEGORY) == is_category)
    return wanted if applies and fits else ERROR


def _check_standardized(name: str, kind: str, settings: _Settings, *, is_number: bool, is_input: bool) -> bool:
    if isinstance(settings.standardize, bool):
        return settings.standardize and is_input and is_number and kind in (INTEGER, FLOAT)
    if name in settings.standardize and (not is_number or kind == BOOLEAN):
        raise UserError(f"Table.standardize names {name!r}, which holds {kind}. Leave it out of the list.")
    return name in settings.standardize


def _check_vocabulary(name: str, kind: str, given: Any) -> tuple[Any, ...]:
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
