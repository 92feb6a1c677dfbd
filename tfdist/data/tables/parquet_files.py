"""Parquet files, whose row groups are read one by one.

Invariant: of a row group only the columns asked for are read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.data.formats.byte_ranges import FileVersion
from tfdist.data.formats.input_files import RangeReader
from tfdist.data.tables.table_files import BOOLEAN, FLOAT, INTEGER, NOTHING, STRING, TableFile
from tfdist.errors import UserError

if TYPE_CHECKING:
    import pyarrow


class ParquetFile(TableFile):
    """A file whose footer is read when this is made, and its rows later.

    Raises:
      UserError: it is no Parquet file.
    """

    def __init__(self, file: FileVersion) -> None:
        import pyarrow
        from pyarrow import parquet

        self.file = file
        try:
            with parquet.ParquetFile(RangeReader(file)) as opened:
                self._metadata, schema = opened.metadata, opened.schema_arrow
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{file.path} is no readable Parquet file: {_first_line(error)}") from error
        self.kinds = {field.name: _kind(field.type) for field in schema}
        sizes = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        self._row_groups = [i for i, size in enumerate(sizes) if size]
        self.group_sizes = tuple(sizes[i] for i in self._row_groups)
        starts = [sum(sizes[:i]) for i in self._row_groups]
        self._starts = tuple(starts)

    @functools.cached_property
    def missing(self) -> Mapping[str, int | None]:
        found: dict[str, int | None] = dict.fromkeys(self.kinds, 0)
        for i in self._row_groups:
            group = self._metadata.row_group(i)
            for c in range(group.num_columns):
                column = group.column(c)
                statistics = column.statistics if column.is_stats_set else None
                count = statistics.null_count if statistics is not None and statistics.has_null_count else None
                name = column.path_in_schema
                before = found.get(name, 0)
                found[name] = None if before is None or count is None else before + count
        return found

    def read_group(self, group: int, names: Sequence[str], kinds: Mapping[str, str]) -> pyarrow.Table:
        import pyarrow
        from pyarrow import parquet

        del kinds  # the file's own types say more
        index = self._row_groups[group]
        try:
            with parquet.ParquetFile(RangeReader(self.file), metadata=self._metadata) as opened:
                return opened.read_row_group(index, columns=list(names), use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self.file.path} is damaged in row group {index}: {_first_line(error)}") from error

    def place(self, group: int, row: int) -> str:
        return f"{self.file.path}, row {self._starts[group] + row} (the first is 0)"


def _kind(kind: Any) -> str:
    """What a column of an Arrow type holds; an unusable type by its own name."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_integer(kind):
        return INTEGER
    if types.is_floating(kind) or types.is_decimal(kind):
        return FLOAT
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return STRING
    if types.is_boolean(kind):
        return BOOLEAN
    return NOTHING if types.is_null(kind) else str(kind)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
