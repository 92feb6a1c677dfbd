"""CSV files, of which runs of rows are read by their place in the file.

A file is scanned once: where each group of rows begins, what its columns hold, how many values are missing. The result
is kept in the user's cache. A row may contain quoted line ends.

Invariant: what is read later is parsed with the types that the scan found.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfdist.data.cache.index_cache import Arrays, cached
from tfdist.data.formats.byte_ranges import FileVersion
from tfdist.data.formats.input_files import read_exactly, scan
from tfdist.data.tables.table_files import BOOLEAN, FLOAT, INTEGER, NOTHING, STRING, TableFile
from tfdist.errors import UserError

if TYPE_CHECKING:
    import pyarrow

VERSION = "csv 1"
KINDS = (NOTHING, BOOLEAN, INTEGER, FLOAT, STRING)
QUOTE, LINE_END, RETURN = b'"\n\r'


class CsvFormat(NamedTuple):
    """How the files are written, and how many rows are read at a time."""

    delimiter: str
    null_values: tuple[str, ...]
    block_rows: int


class CsvFile(TableFile):
    """A file whose first row names the columns.

    Raises:
      UserError: rows differ in length, a quote is not closed, names repeat, or it is no UTF-8 text.
    """

    def __init__(self, file: FileVersion, form: CsvFormat) -> None:
        self.file = file
        self._form = form
        index = cached(file, repr((VERSION, form)), lambda: _scanned(file, form))
        self._names = index["names"].tolist()
        self._offsets = index["offsets"]
        self._lines = index["lines"]
        self.group_sizes = tuple(index["sizes"].tolist())
        self.kinds = {name: KINDS[code] for name, code in zip(self._names, index["kinds"], strict=True)}
        self.missing = dict(zip(self._names, index["missing"].tolist(), strict=True))

    def read_group(self, group: int, names: Sequence[str], kinds: Mapping[str, str]) -> pyarrow.Table:
        begin, end = self._offsets[group : group + 2].tolist()
        data = read_exactly(self.file, begin, end - begin)
        return _parsed(data, self._names, self._form, self.file.path, int(self._lines[group]), names, kinds)

    def place(self, group: int, row: int) -> str:
        begin, end = self._offsets[group : group + 2].tolist()
        data = read_exactly(self.file, begin, end - begin)
        return f"{self.file.path}:{_line_of_row(data, int(self._lines[group]), row)}"


def _scanned(file: FileVersion, form: CsvFormat) -> Arrays:
    names: list[str] = []
    offsets, lines, sizes = [], [], []
    kinds, missing = np.zeros(0, np.int64), np.zeros(0, np.int64)
    end = file.num_bytes
    for offset, line, data, size in _groups(file, form.block_rows):
        if not names:
            names = _header(data, form.delimiter, file.path)
            kinds, missing = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
            continue
        table = _parsed(data, names, form, file.path, line)
        if table.num_rows != size:
            raise UserError(f"{file.path}:{line}: a line ends with a carriage return alone. End lines with a newline.")
        found = np.array([_code(field.type, f"{file.path}:{line}", field.name) for field in table.schema])
        kinds = _wider(kinds, found)
        missing += [column.null_count for column in table.columns]
        offsets.append(offset)
        lines.append(line)
        sizes.append(size)
        end = offset + len(data)
    return {
        "names": np.array(names, dtype=np.str_),
        "offsets": np.array([*offsets, end], np.int64),
        "lines": np.array(lines, np.int64),
        "sizes": np.array(sizes, np.int64),
        "kinds": kinds,
        "missing": missing,
    }


def _wider(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The kinds that hold both: whole numbers are numbers, and anything else that differs is read as strings."""
    numbers = (KINDS.index(INTEGER), KINDS.index(FLOAT))
    mixed = (ours != theirs) & (np.minimum(ours, theirs) > 0) & ~(np.isin(ours, numbers) & np.isin(theirs, numbers))
    return np.where(mixed, KINDS.index(STRING), np.maximum(ours, theirs))


def _groups(file: FileVersion, block_rows: int) -> Iterator[tuple[int, int, bytes, int]]:
    """(offset, line, bytes, rows) of the header, then of every `block_rows` rows; empty lines are no rows."""
    offset, line, held, wanted = 0, 1, b"", 1
    for part in itertools.chain(scan(file), [b""]):
        is_last = not part
        held += part
        ends, is_row = _rows(held, closed=is_last, path=file.path, line=line)
        counts = np.cumsum(is_row)
        begin = done = 0
        while True:
            at = int(np.searchsorted(counts, done + wanted))
            if at >= len(ends):
                if not is_last or not len(counts) or counts[-1] == done:
                    break
                at = len(ends) - 1  # what is left is fewer rows
            data, size = held[begin : ends[at]], int(counts[at]) - done
            yield offset, line, data, size
            offset, line = offset + len(data), line + data.count(b"\n")
            begin, done, wanted = int(ends[at]), int(counts[at]), block_rows
        held = held[begin:]


def _rows(data: bytes, *, closed: bool, path: str, line: int) -> tuple[np.ndarray, np.ndarray]:
    """Where rows end, and which are not empty lines. A line end between quotes ends no row."""
    values = np.frombuffer(data, np.uint8)
    line_ends = np.nonzero(values == LINE_END)[0]
    quotes = np.nonzero(values == QUOTE)[0]
    if closed and len(quotes) % 2:
        raise UserError(f"{path}:{line + data[: quotes[-1]].count(LINE_END)}: a quote is not closed.")
    ends = line_ends[np.searchsorted(quotes, line_ends) % 2 == 0] + 1
    if closed and data and (not len(ends) or ends[-1] != len(data)):
        ends = np.append(ends, len(data))
    begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    lengths = ends - begins
    first = values[begins] if len(ends) else values[:0]
    is_empty = (lengths == 1) & (first == LINE_END) | (lengths <= 2) & (first == RETURN)
    return ends, ~is_empty


def _line_of_row(data: bytes, line: int, row: int) -> int:
    """The number of the line on which a row of these bytes begins, `line` being the first's."""
    ends, is_row = _rows(data, closed=True, path="", line=line)
    number = int(np.nonzero(is_row)[0][row])
    return line + data[: int(ends[number - 1]) if number else 0].count(b"\n")


def _header(data: bytes, delimiter: str, path: str) -> list[str]:
    try:
        names = next(csv.reader(io.StringIO(data.decode("utf-8-sig").lstrip("\r\n")), delimiter=delimiter))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}). Is it compressed, or of another encoding? Write it as "
            "plain text in UTF-8."
        ) from error
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        raise UserError(
            f"{path}: the first line names the columns; received {names}, with {repeated} empty or repeated. (pandas "
            "leaves the name of its index empty, which to_csv(index=False) leaves out.)"
        )
    return names


def _parsed(
    data: bytes,
    names: Sequence[str],
    form: CsvFormat,
    path: str,
    line: int,
    wanted: Sequence[str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> pyarrow.Table:
    """The columns of some rows, of the types found or of those given."""
    import pyarrow
    from pyarrow import csv as arrow_csv

    types = {INTEGER: pyarrow.int64(), FLOAT: pyarrow.float64(), BOOLEAN: pyarrow.bool_(), STRING: pyarrow.string()}
    given = {name: types[kind] for name, kind in (kinds or {}).items() if kind in types}
    try:
        return arrow_csv.read_csv(
            io.BytesIO(data),
            read_options=arrow_csv.ReadOptions(
                column_names=list(names), use_threads=False, block_size=max(len(data), 1)
            ),
            parse_options=arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=given,
                include_columns=list(wanted) if wanted is not None else None,
                null_values=list(form.null_values),
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                timestamp_parsers=[],
            ),
        )
    except pyarrow.ArrowInvalid as error:
        text = str(error).split("\n")[0]
        ragged = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", text)
        if ragged is None:
            raise UserError(f"{path}:{line}: {text}") from error
        at = _line_of_row(data, line, int(ragged[1]) - 1)
        raise UserError(
            f"{path}:{at}: this row has {ragged[3]} values, but the first line names {ragged[2]} columns."
        ) from error


def _code(kind: Any, where: str, name: str) -> int:
    from pyarrow import types

    if types.is_binary(kind):
        raise UserError(f"{where}: the column {name!r} is not UTF-8 text. Write the file in UTF-8.")
    if types.is_null(kind):
        return KINDS.index(NOTHING)
    if types.is_boolean(kind):
        return KINDS.index(BOOLEAN)
    if types.is_integer(kind):
        return KINDS.index(INTEGER)
    return KINDS.index(FLOAT if types.is_floating(kind) else STRING)
