"""Reads what a source has fitted and left in the run directory: vocabularies, means, labels.

Invariant: a file that was damaged, or that something else wrote, is one message. `tables.py` and `text.py` call this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.json_text import from_json

_T = TypeVar("_T")


def read_kept(path: str, understand: Callable[[dict[str, Any]], _T]) -> _T:
    """What `understand` makes of the JSON object in a file.

    Args:
      understand: raises KeyError, TypeError or ValueError for what is not as a source leaves it.

    Raises:
      UserError: it cannot be understood.
    """
    try:
        kept = from_json(files.read(path))
        if not isinstance(kept, dict):
            raise ValueError("it is no object")
        return understand(kept)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not what a training left there: {error}. It holds what was fitted to the data. Restore it from "
            "a copy of the run; or remove it, and the data is fitted anew."
        ) from error
