"""`%RUN_DIR`: the run's directory in a value, `%RUN_DIR/log.csv` or `'%RUN_DIR/{epoch:02d}.keras'`.

Invariant: in a configuration it stays as it is written, so that config.gin and a run's identity do not depend on where
the run lies; it becomes a path only in the values of the call that is given a run directory. Knows nothing of gin;
called by `tfdist.config.loading` and `statements.py`.
"""

from __future__ import annotations

from typing import Any

from tfdist.config.graph import map_references

NAME = "RUN_DIR"
_TEXT = f"%{NAME}"


def is_within(macro: str) -> bool:
    """Whether `macro`, without its %, is the run directory or a path below it."""
    return macro == NAME or macro.startswith(f"{NAME}/")


def is_used(value: Any) -> bool:
    """Whether a value holds a text that begins with %RUN_DIR."""
    found: list[str] = []
    map_references(value, lambda text: found.append(text) if _is_path(text) else None, str)
    return bool(found)


def substitute(value: Any, run_dir: str) -> Any:
    """The value, with every text in it that begins with %RUN_DIR become a path."""
    return map_references(value, lambda text: _path(text, run_dir) if _is_path(text) else text, str)


def _is_path(text: str) -> bool:
    return text == _TEXT or text.startswith(f"{_TEXT}/")


def _path(text: str, run_dir: str) -> str:
    return f"{run_dir.rstrip('/')}{text.removeprefix(_TEXT)}" if text != _TEXT else run_dir
