"""How wide the terminal is on which this process's lines are read, also where a launcher passes them on.

Invariant: a file or a pipe has no width, unless the launcher that reads the pipe named one in the variable VARIABLE of
this process's environment. The consoles ask; `tfdist.launch` names it to its workers, and main.py passes it to `begin`.
"""

from __future__ import annotations

import shutil
from typing import TextIO

VARIABLE = "TFDIST_COLUMNS"

_beyond_pipe: int | None = None


def begin(columns: str | None) -> None:
    """Takes the value of VARIABLE; None where nobody set it."""
    global _beyond_pipe
    _beyond_pipe = int(columns) if columns is not None and columns.isdecimal() else None


def columns_of(stream: TextIO) -> int | None:
    """Columns that a line has; None where it may be of any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else _beyond_pipe
