"""What every format of tables offers: files of rows in groups, of which any can be read by itself.

Invariant: a group is the smallest part that is read. Groups are numbered through the file, and no group is empty.
`parquet_files.py` and `csv_files.py` implement it for `tables.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfdist.data.formats.byte_ranges import FileVersion
from tfdist.errors import UserError, missing_extra

if TYPE_CHECKING:
    import pyarrow

INTEGER, FLOAT, STRING, BOOLEAN, NOTHING = "whole numbers", "numbers", "strings", "true or false", "nothing"
NUMERIC = (INTEGER, FLOAT, BOOLEAN)


class TableFile(abc.ABC):
    """One file of a table.

    Attributes:
      file: where it lies.
      kinds: what each column holds, by name; NOTHING where all its values are missing.
      missing: how many values each column lacks; None where the file does not say.
      group_sizes: rows of each group.
    """

    file: FileVersion
    kinds: Mapping[str, str]
    missing: Mapping[str, int | None]
    group_sizes: Sequence[int]

    @abc.abstractmethod
    def read_group(self, group: int, names: Sequence[str], kinds: Mapping[str, str]) -> pyarrow.Table:
        """Columns of one group, as the kinds of the whole table; called by several threads at once."""

    @abc.abstractmethod
    def place(self, group: int, row: int) -> str:
        """Where a row of a group is, as the user would look for it."""

    @property
    def num_rows(self) -> int:
        return sum(self.group_sizes)


def common_kinds(tables: Sequence[TableFile], names: Sequence[str]) -> dict[str, str]:
    """What the columns hold in all files.

    Raises:
      UserError: a column is of one kind here and of another there.
    """
    found: dict[str, tuple[str, TableFile]] = {}
    for table in tables:
        for name in names:
            kind = table.kinds.get(name, NOTHING)
            before, where = found.get(name, (NOTHING, table))
            if before != kind and NOTHING not in (before, kind):
                if {before, kind} != {INTEGER, FLOAT}:
                    raise UserError(
                        f"The column {name!r} holds {kind} in {table.file.path}, but {before} in {where.file.path}. "
                        "Write the same type in every file."
                    )
                kind = FLOAT
            found[name] = (before, where) if kind in (NOTHING, before) else (kind, table)
    return {name: kind for name, (kind, _) in found.items()}


def arrow() -> None:
    """Raises UserError where pyarrow is missing."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise missing_extra("pyarrow", "tables", "Reading Parquet and CSV tables") from error
