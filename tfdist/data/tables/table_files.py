"""Reads Parquet and CSV files whole, by pyarrow, and says what their columns hold.

Invariant: every byte comes through `read_whole`; what is wrong with a file is a UserError that names it.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.data.formats.input_files import read_whole
from tfdist.data.sources.columns import Columns
from tfdist.errors import UserError, check_package
from tfdist.storage.contents import FileVersion

if TYPE_CHECKING:
    import pyarrow

INTEGER, FLOAT, STRING, BOOLEAN, NULL = "whole numbers", "numbers", "strings", "true or false", "nothing"
NUMERIC = (INTEGER, FLOAT, BOOLEAN)
PARQUET_SUFFIXES = (".parquet", ".pq")
CSV_SUFFIXES = (".csv", ".tsv", ".txt")
NULL_VALUES = ["", "NA", "NaN", "nan", "null"]
CSV_BLOCK_BYTES = 1 << 30  # types are found in the first block; Arrow's limit is twice this


def read_table(file: FileVersion, columns: Columns | None = None, *, delimiter: str | None = None) -> pyarrow.Table:
    """Reads a file, by its ending.

    Args:
      file: Parquet, or CSV with a first row of names. A CSV file that is quite empty has neither columns nor rows.
      columns: those to keep; None keeps all.
      delimiter: as in `Table`.

    Raises:
      UserError: it cannot be read, or lacks a column.
    """
    check_package("pyarrow", "pyarrow", "tables", "Reading Parquet and CSV tables")
    suffix = os.path.splitext(file.path)[1].lower()
    if suffix in PARQUET_SUFFIXES:
        return _read_parquet(file, columns)
    if suffix not in CSV_SUFFIXES:
        raise UserError(
            f"{file.path} is no table that can be read: files end in {', '.join((*PARQUET_SUFFIXES, *CSV_SUFFIXES))}, "
            "and CSV files are not compressed."
        )
    rows = _read_csv(file, delimiter or ("\t" if suffix == ".tsv" else ","))
    if columns is None or not rows.num_columns:
        return rows
    columns.check(rows.column_names, file.path)
    return rows.select(columns.names)


def find_kinds(rows: pyarrow.Table) -> dict[str, str]:
    """What each column holds, by name: NULL where all its values are missing."""
    return {field.name: _find_kind(field.type) for field in rows.schema}


def find_common_kinds(tables: Mapping[str, pyarrow.Table], names: Sequence[str]) -> dict[str, str]:
    """Finds the kind of each column in all tables, which are given by the paths of their files.

    Raises:
      UserError: a column is of one kind here and of another there.
    """
    found, kinds = {}, {path: find_kinds(rows) for path, rows in tables.items()}
    for name in names:
        # The first file of each kind.
        files = {kinds[path][name]: path for path in reversed(kinds) if kinds[path].get(name, NULL) != NULL}
        if FLOAT in files:
            files.pop(INTEGER, None)
        if len(files) > 1:
            (kind, path), (other, first), *_ = files.items()
            raise UserError(
                f"The column {name!r} holds {kind} in {path}, but {other} in {first}. Write the same type in every "
                "file."
            )
        found[name] = next(iter(files), NULL)
    return found


def _read_parquet(file: FileVersion, columns: Columns | None) -> pyarrow.Table:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(io.BytesIO(read_whole(file))) as opened:
            if columns is not None:
                columns.check(opened.schema_arrow.names, file.path)
            rows = opened.read(columns=columns and columns.names)
            return rows.cast(pyarrow.schema([(field.name, _plain_type(field.type)) for field in rows.schema]))
    except (pyarrow.ArrowException, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{file.path} is no readable Parquet file: {reason}") from error


def _read_csv(file: FileVersion, delimiter: str) -> pyarrow.Table:
    import pyarrow

    data = read_whole(file)
    if not data.strip():
        return pyarrow.table({})
    if data.count(b'"') % 2 and _ends_in_quotes(data, delimiter):
        raise UserError(f"{file.path}: a quote is not closed.")
    rows = _parse_csv(data, delimiter, file.path, {})
    strange = [field.name for field in rows.schema if _find_kind(field.type) == str(field.type)]
    if strange:  # dates and times stay the texts that they are in the file
        rows = _parse_csv(data, delimiter, file.path, dict.fromkeys(strange, pyarrow.string()))
    return rows


def _parse_csv(data: bytes, delimiter: str, path: str, types: Mapping[str, Any]) -> pyarrow.Table:
    import pyarrow
    from pyarrow import csv as arrow_csv

    block_bytes = min(len(data), CSV_BLOCK_BYTES)
    try:
        table = arrow_csv.read_csv(
            io.BytesIO(data),
            read_options=arrow_csv.ReadOptions(use_threads=False, block_size=block_bytes),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=types,
                null_values=NULL_VALUES,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                timestamp_parsers=[],
            ),
        )
    except pyarrow.ArrowInvalid as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{path}: {reason}. Write UTF-8 text, with as many values in each row as the first line names columns."
        ) from error
    repeated = sorted({name for name in table.column_names if table.column_names.count(name) > 1 or not name})
    if repeated:
        raise UserError(
            f"{path}: the first line names the columns; received {table.column_names}, with {repeated} empty or "
            "repeated. (pandas leaves the name of its index empty, which to_csv(index=False) leaves out.)"
        )
    return table


def _ends_in_quotes(data: bytes, delimiter: str) -> bool:
    """Looks for a cell that begins with a quote and has no other; within another cell a quote is text."""
    cell = rb"(?:\A(?:\xef\xbb\xbf)?|[\r\n" + re.escape(delimiter.encode()) + rb'])"[^"]*+(?:""[^"]*+)*+("?)'
    return any(not found[1] for found in re.finditer(cell, data))


def _plain_type(kind: Any) -> Any:
    """The Arrow type of values that a file stores in a dictionary or as views."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    return "string" if types.is_string_view(kind) else kind


def _find_kind(kind: Any) -> str:
    """The kind of a column of an Arrow type; an unusable type by its own name."""
    from pyarrow import types

    if types.is_integer(kind):
        return INTEGER
    if types.is_floating(kind) or types.is_decimal(kind):
        return FLOAT
    if types.is_string(kind) or types.is_large_string(kind):
        return STRING
    if types.is_boolean(kind):
        return BOOLEAN
    return NULL if types.is_null(kind) else str(kind)
