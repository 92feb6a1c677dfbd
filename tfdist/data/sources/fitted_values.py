"""Reads what a source has fitted and left in the run directory: vocabularies, means, labels.

Invariant: a file that was damaged, or that something else wrote, is one message. `tables.py` and `text.py` call this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tfdist.storage import files
from tfdist.telemetry.records import damaged, parse_record

_T = TypeVar("_T")


def read_kept(path: str, understand: Callable[[dict[str, Any]], _T]) -> _T:
    """What `understand` makes of the JSON object in a file.

    Args:
      understand: raises KeyError, TypeError or ValueError for what is not as a source leaves it.

    Raises:
      UserError: it cannot be understood.
    """
    try:
        return understand(parse_record(path, files.read(path), dict[str, Any]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, str(error)) from error
