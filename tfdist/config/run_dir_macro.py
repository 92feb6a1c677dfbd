"""`%RUN_DIR`: the run's directory in a value, `%RUN_DIR/log.csv` or `'%RUN_DIR/{epoch:02d}.keras'`.

Invariant: in a configuration it stays as it is written, so that config.gin and a run's identity do not depend on where
the run lies; it becomes a path only in the values of the call that is given a run directory. Knows nothing of gin;
called by `tfdist.config.loading` and `statements.py`.
"""

from __future__ import annotations

from typing import Any

from tfdist.config.graph import map_references
from tfdist.errors import UserError

NAME = "RUN_DIR"
_TEXT = f"%{NAME}"


def is_within(macro: str) -> bool:
    """Whether `macro`, without its %, is the run directory or a path below it."""
    return macro == NAME or macro.startswith(f"{NAME}/")


def substitute(value: Any, run_dir: str | None) -> Any:
    """The value, with every text in it that begins with %RUN_DIR become a path.

    Raises:
      UserError: there is such a text, and no run directory.
    """

    def substitute_text(text: str) -> str:
        if text != _TEXT and not text.startswith(f"{_TEXT}/"):
            return text
        if run_dir is None:
            raise UserError(f"{_TEXT} is used, and this command has no run directory.")
        return f"{run_dir.rstrip('/')}{text.removeprefix(_TEXT)}" if text != _TEXT else run_dir

    return map_references(value, substitute_text, str)
