"""Tables in Parquet and CSV files: columns become inputs and targets, encoded alike in every split.

Invariant: a worker reads the groups of rows that its own streams lie in, and no others, in training and in evaluation.
Training without shuffling goes through the rows in their order, so that a group is read by every worker that has a part
of its batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.cache.group_cache import GroupCache
from tfdist.data.formats.byte_ranges import FileVersion
from tfdist.data.formats.input_files import Patterns, find_files
from tfdist.data.order.block_order import BlockOrder
from tfdist.data.pipeline.failures import noted
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.fitted_values import read_kept
from tfdist.data.sources.preprocessing import Preprocessing
from tfdist.data.sources.source import Order, Reader, Source
from tfdist.data.tables.csv_files import CsvFile, CsvFormat
from tfdist.data.tables.parquet_files import ParquetFile
from tfdist.data.tables.table_encoding import Fitted, Rule, encode, fit, num_indices, vocabulary
from tfdist.data.tables.table_files import TableFile, arrow, common_kinds
from tfdist.data.tables.table_preprocessing import encoder, raw_spec, raw_values
from tfdist.data.tables.table_rules import Settings, build_rules
from tfdist.errors import UserError, is_whole_number
from tfdist.storage import files as storage

PARQUET_SUFFIXES = (".parquet", ".pq")
CSV_SUFFIXES = (".csv", ".tsv", ".txt")
CSV_BLOCK_ROWS = 1024
NULL_VALUES = ("", "NA", "NaN", "nan", "null")
WINDOW_GROUPS = 2
HELD_VALUES = 1 << 26
FIT_VERSION = 1


class Table(Source):
    """Rows of Parquet files (`.parquet`) or of CSV files with a first row of names (`.csv`, `.tsv`).

    Numbers become float32, whole numbers int64, categories int32 indices. Strings are categories unless named in
    `strings`. Example:

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
      strings: columns of strings that stay strings, for a model that takes them.
      vocabularies: by column, the values of a category in the order of their indices; not fitted then.
      unseen: of input categories, what is done with a value that is not in the vocabulary: "error", "category" (the
        index after the last), or an index. In a target it is an error always.
      missing: what is done with a missing value (of numbers, not-a-number too): "error", "mean", "category" (the index
        after the last, and after that of `unseen`), a number; for all inputs that it fits, or by column in a dict,
        where it can also be a value of the category. Targets and weights need an entry in a dict.
      standardize: input columns that are shifted and scaled to mean 0 and variance 1 over the fitted rows; True means
        all that are numbers.
      stack_inputs: makes one float32 matrix [n, number of inputs] of the inputs.
      num_classes: checks that the target's values are 0 … num_classes - 1.
      delimiter: between the values of a CSV file; None takes a tab for .tsv and a comma for others.
      null_values: what a missing value looks like in a CSV file, unless in quotes.
      block_rows: rows of a CSV file that are read together.

    Raises:
      UserError: files or columns are missing, contradict each other, or cannot be done what is asked with.
    """

    calls_python = True

    def __init__(
        self,
        *,
        files: Patterns,
        columns: Columns,
        fitted_on: Patterns | None = None,
        categories: Sequence[str] = (),
        strings: Sequence[str] = (),
        vocabularies: Mapping[str, Sequence[Any]] | None = None,
        unseen: str | int = "error",
        missing: Any = "error",
        standardize: bool | Sequence[str] = False,
        stack_inputs: bool = False,
        num_classes: int | None = None,
        delimiter: str | None = None,
        null_values: Sequence[str] = NULL_VALUES,
        block_rows: int = CSV_BLOCK_ROWS,
    ) -> None:
        arrow()
        if not is_whole_number(block_rows):
            raise UserError(f"Table.block_rows is {block_rows!r}; write a whole number of rows, at least 1.")
        self._open = functools.partial(
            open_table, delimiter=delimiter, null_values=tuple(null_values), block_rows=block_rows
        )
        self._columns = columns
        self._stack = stack_inputs
        self._tables = _with_columns([self._open(file) for file in find_files(files, "Table.files")], columns)
        self.num_examples = sum(table.num_rows for table in self._tables)
        if not self.num_examples:
            raise UserError(f"The table {files!r} has no rows, in {len(self._tables)} files.")
        self._groups = [(table, group) for table in self._tables for group in range(len(table.group_sizes))]
        self._sizes = tuple(table.group_sizes[group] for table, group in self._groups)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)]).astype(np.int64)
        self._fit_tables: list[TableFile] = []
        if fitted_on is not None:
            found = find_files(fitted_on, "Table.fitted_on")
            self._fit_tables = _with_columns([self._open(file) for file in found], columns)
        self._kinds = _kinds(self._fit_tables, self._tables, columns.names)
        settings = Settings(
            columns, categories, strings, vocabularies or {}, unseen, missing, standardize, stack_inputs, num_classes
        )
        self._rules = build_rules(settings, self._kinds)
        self._fitted_on = fitted_on
        self._fitted: Fitted | None = None
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
        """What the training rows say; read from them the first time, unless `prepare` found it."""
        if self._fitted is None:
            self._fitted = self._fit() if self._rules_to_fit else Fitted()
        return self._fitted

    def prepare(self, directory: str) -> None:
        """Takes what was fitted from `directory`, where the first who comes leaves it: one fit serves a whole run."""
        if not self._rules_to_fit:
            return
        wanted = [FIT_VERSION, self._fitted_on, [dataclasses.astuple(rule) for rule in self._rules_to_fit]]
        digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]
        path = storage.join(directory, f"table-{digest}.json")
        if storage.exists(path):
            self._fitted = read_kept(path, _understood)
            return
        storage.make_dirs(directory)
        storage.write_atomic(path, json.dumps(dataclasses.asdict(self.fitted), ensure_ascii=False, indent=1) + "\n")

    def reader(self, order: Order) -> Reader:
        fitted = self.fitted
        cache = GroupCache(
            lambda group: self._decoded(group, fitted),
            self._sizes,
            most_rows=HELD_VALUES // len(self._rules),
            window_groups=WINDOW_GROUPS,
        )
        blocks = self._block_order(order)
        specs = tf.nest.flatten(self.structure)

        def fetch(positions: np.ndarray, epoch: np.ndarray) -> list[np.ndarray]:
            rows = positions if blocks is None else blocks.records(positions, int(epoch))
            return self._rows(rows, cache)

        safe = noted(fetch)

        def read(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            flat = tf.numpy_function(safe, [positions, epoch], [spec.dtype for spec in specs])
            shaped = [tf.ensure_shape(t, spec.shape) for t, spec in zip(flat, specs, strict=True)]
            return tf.nest.pack_sequence_as(self.structure, shaped)

        return read

    def describe(self) -> list[str]:
        lines = [
            f"{len(self._tables)} files, {len(self._groups)} groups of up to {max(self._sizes):,} rows, "
            f"{sum(table.file.num_bytes for table in self._tables):,} bytes"
        ]
        for name, rule in self._rules.items():
            counts = [table.missing.get(name, 0) for table in self._tables if table.kinds]
            missing = "unknown" if None in counts else f"{sum(count or 0 for count in counts):,}"
            what = f"{name}: {rule.kind} → {rule.dtype}, {missing} missing ({rule.missing})"
            if rule.is_category:
                known = [str(value) for value in vocabulary(rule, self.fitted)]
                shown = ", ".join(known[:6]) + (", …" if len(known) > 6 else "")
                what += f", indices 0 … {num_indices(rule, self.fitted) - 1} of {len(known)} values: {shown}"
            if rule.is_standardized:
                what += f", mean {self.fitted.means[name]:.4g}, deviation {self.fitted.deviations[name]:.4g}"
            lines.append(what)
        return lines

    def preprocessing(self) -> Preprocessing:
        tables, names = tf.Module(), self._columns.input_names
        encoders = {name: encoder(self._rules[name], self.fitted, tables) for name in names}

        def encoded(raw: Mapping[str, tf.Tensor]) -> Any:
            columns = {name: encoders[name](raw[name]) for name in names}
            if self._stack:
                return tf.stack([tf.cast(each, tf.float32) for each in columns.values()], axis=1)
            return self._columns.inputs_of(columns)

        def first(count: int) -> dict[str, np.ndarray]:
            found: dict[str, list[Any]] = {name: [] for name in names}
            for table, group in self._groups:
                held = table.read_group(group, names, self._kinds).slice(0, count - len(found[names[0]]))
                for name, values in found.items():
                    values += held[name].to_pylist()
            return {name: raw_values(self._rules[name], values) for name, values in found.items()}

        specs = {name: raw_spec(self._rules[name]) for name in names}
        return Preprocessing(specs, encoded, tables, first)

    def _block_order(self, order: Order) -> BlockOrder | None:
        if order.seed is None and not order.any_order:
            return None
        return BlockOrder(self._sizes, batch_size=order.batch_size, seed=order.seed, window_blocks=WINDOW_GROUPS)

    def _fit(self) -> Fitted:
        def groups() -> Iterator[Any]:
            names = [rule.name for rule in self._rules_to_fit]
            for table in self._fit_tables:
                for group in range(len(table.group_sizes)):
                    yield table.read_group(group, names, self._kinds)

        return fit(self._rules_to_fit, groups())

    def _rows(self, rows: np.ndarray, cache: GroupCache) -> list[np.ndarray]:
        specs = tf.nest.flatten(self.structure)
        found = [np.empty([len(rows), *s.shape[1:]], object if s.dtype == tf.string else s.dtype.name) for s in specs]
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        for group in np.unique(groups).tolist():
            chosen = np.nonzero(groups == group)[0]
            within = rows[chosen] - self._starts[group]
            for into, held in zip(found, cache.get(group), strict=True):
                into[chosen] = held[within]
        return found

    def _decoded(self, number: int, fitted: Fitted) -> list[np.ndarray]:
        table, group = self._groups[number]
        held = table.read_group(group, self._columns.names, self._kinds)
        encoded = {
            name: encode(rule, held[name], fitted, functools.partial(table.place, group))
            for name, rule in self._rules.items()
        }
        return tf.nest.flatten(self._nest(encoded, lambda inputs: np.stack(list(inputs.values()), axis=1)))

    def _nest(self, columns: Mapping[str, Any], stack: Any) -> Any:
        """The nest of an example; `stack` makes one of the inputs where that is asked for."""
        x, *rest = self._columns.select(columns)
        if self._stack:
            x = stack({name: columns[name] for name in self._columns.input_names})
        return (x, *rest)


def open_table(
    file: FileVersion,
    *,
    delimiter: str | None = None,
    null_values: tuple[str, ...] = NULL_VALUES,
    block_rows: int = CSV_BLOCK_ROWS,
) -> TableFile:
    """A file of a table, by its ending; the arguments are those of `Table`. Raises UserError for any other ending."""
    suffix = os.path.splitext(file.path)[1].lower()
    if suffix in PARQUET_SUFFIXES:
        return ParquetFile(file)
    if suffix not in CSV_SUFFIXES:
        raise UserError(
            f"{file.path} is no table that can be read: files end in {', '.join((*PARQUET_SUFFIXES, *CSV_SUFFIXES))}, "
            "and CSV files are not compressed."
        )
    return CsvFile(file, CsvFormat(delimiter or ("\t" if suffix == ".tsv" else ","), null_values, block_rows))


def _kinds(fitted: Sequence[TableFile], tables: Sequence[TableFile], names: Sequence[str]) -> dict[str, str]:
    """What the columns hold. What they hold in the training files counts, or splits would differ in their types."""
    everywhere = common_kinds([*fitted, *tables], names)
    if not fitted:
        return everywhere
    counted = common_kinds(fitted, names)
    for name, kind in counted.items():
        if everywhere[name] != kind:
            raise UserError(
                f"The column {name!r} holds {everywhere[name]} in {tables[0].file.path}, but {kind} in the training "
                f"files, {fitted[0].file.path} and so on. Write the same type in all."
            )
    return counted


def _with_columns(tables: Sequence[TableFile], columns: Columns) -> list[TableFile]:
    """The tables, each of which has the columns, unless it is quite empty."""
    for table in tables:
        if table.kinds or table.num_rows:
            columns.check(list(table.kinds), table.file.path)
    return list(tables)


def _understood(kept: dict[str, Any]) -> Fitted:
    """What was fitted, as it was left; raises TypeError or ValueError for anything else."""
    fitted = Fitted(**kept)
    if not all(isinstance(each, list) for each in fitted.vocabularies.values()):
        raise ValueError("a vocabulary is no list")
    numbers = [*fitted.means.values(), *fitted.deviations.values()]
    if not all(isinstance(each, int | float) for each in numbers):
        raise ValueError("a mean or deviation is no number")
    return fitted
