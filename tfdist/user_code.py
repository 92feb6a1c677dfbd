"""Whose code an exception comes from, and how to say it in one message.

Invariant: a file is the user's own if it is neither tfdist's, nor an installed library's, nor Python's. Messages show
the user's own lines; for the frames between them there is the traceback of `--verbose`.
"""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from tfdist.errors import UserError, build_user_error

_TFDIST = f"{Path(__file__).resolve().parent}{os.sep}"
_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
# Their errors in a graph mean that an operation refused the values it got.
_REFUSALS = ("InvalidArgumentError", "UnimplementedError")
_PIPELINE_REFUSALS = (*_REFUSALS, "NotFoundError", "PermissionDeniedError", "DataLossError")
_IN_PIPELINE = re.compile(
    r"Error in user-defined function passed to \S+ transformation with iterator: \S+ (.+)", re.DOTALL
)
_PASSING = ("Connection", "Timeout", "BrokenPipe", "OSError", "MemoryError")
_GRAPH_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_GRAPH_SIGNS = ("Graph execution error", "Traceback (most recent call last)", "Error in user-defined function")
_MAX_PLACES = 3
_MAX_REASON = 300  # characters
_MAX_LINES = 12


def build_error(what: str, error: BaseException) -> UserError:
    """The UserError for what the user's code, or a library called with the user's values, raised."""
    return build_user_error(
        "\n    ".join([f"{what} failed: {format_exception(error)}", *list_own_frames(error)]), error_id="code-failure"
    )


def format_exception(error: BaseException) -> str:
    """An exception's type and text, without empty lines, colors and what notes add.

    Of Python code that TensorFlow ran, what that raised.
    """
    inside = _python_traceback(error)
    text = inside.rpartition('  File "')[2].partition("\n\n")[2].partition("\n\t [[")[0] if inside else str(error)
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines() if line.strip()]
    if len(lines) > _MAX_LINES:
        lines = [*lines[:_MAX_LINES], "…"]
    return ": ".join(filter(None, ["" if inside else type(error).__name__, "\n".join(lines)]))


def list_own_frames(error: BaseException) -> list[str]:
    """The last of the user's own lines that an exception came through, `file:line, in function: text`, outermost first.

    An exception of a graph that runs has no such lines in its traceback; then they are those that made the operation,
    or of the Python code that TensorFlow ran.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    places = [f"{format_path(f.filename)}:{f.lineno}, in {f.name}: {f.line}" for f in frames]
    if not places and _is_graph_failure(error):
        named = [f for f in _graph_frames(_python_traceback(error) or str(error)) if is_own(f["file"])]
        places = [f"{format_path(f['file'])}:{f['line']}, in {f['function']}" for f in named]
    return list(dict.fromkeys(places))[-_MAX_PLACES:]


def is_own(filename: str) -> bool:
    """Whether the user wrote the file."""
    if any(part in filename for part in ("site-packages", "dist-packages", "__autograph_generated_file", "<")):
        return False
    is_cython = filename.endswith((".pyx", ".pxi"))
    return not is_cython and not os.path.abspath(filename).startswith((_TFDIST, *_PYTHON))


def refused_values(error: BaseException) -> UserError | None:
    """The UserError for what the user's code refused in a running graph: an operation its values, or Python code.

    A label that is no class and an index that is in no embedding end so, and functions of the user's own input pipeline
    that fail. None for any other exception.
    """
    if not _is_graph_failure(error):
        return None
    if inside := _python_traceback(error):
        return None if _TFDIST in inside else build_error("Your code", error)
    text = str(error)
    if (in_pipeline := _IN_PIPELINE.search(text)) is not None and type(error).__name__ in _PIPELINE_REFUSALS:
        return build_user_error(
            f"A function of the input pipeline failed: {_reason(in_pipeline[1])}", error_id="code-failure"
        )
    if type(error).__name__ not in _REFUSALS:
        return None
    frames = _graph_frames(text)
    nearest = next((f["file"] for f in reversed(frames) if "site-packages" not in f["file"]), "")
    is_gradient = "{{node gradient_tape/" in text
    is_computed = any(f"{os.sep}{place}{os.sep}" in nearest for place in ("tasks", "models"))
    if not (is_own(nearest) or is_computed or is_gradient):
        return None
    reason = _reason(text[frames[-1].end() if frames else 0 :])
    operation = re.search(r"\{\{node (?:gradient_tape/)?(?:while/)*([^}]+)\}\}", text)
    where = f" (in {operation[1]})" if operation else ""
    return build_user_error(
        "\n    ".join(
            [f"The model or the loss cannot compute on these examples{where}: {reason}", *list_own_frames(error)]
        ),
        error_id="code-failure",
    )


def may_pass(error: BaseException) -> bool:
    """Whether Python code that TensorFlow ran lost a connection or the like, which a restart may not meet again."""
    return bool(_python_traceback(error)) and format_exception(error).startswith(_PASSING)


def where_defined(function: Any) -> str:
    """` (file:line)` of a function or class of the user's own; empty for anything else."""
    try:
        found = inspect.unwrap(function)
        filename, line = inspect.getsourcefile(found), inspect.getsourcelines(found)[1]
    except (TypeError, OSError, ValueError):
        return ""
    return f" ({format_path(filename)}:{line})" if filename and is_own(filename) else ""


def format_path(filename: str) -> str:
    """A path as the user would write it: relative when it lies below the working directory."""
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative


def _graph_frames(text: str) -> list[re.Match[str]]:
    """The lines that made the operation, without those of whoever called tfdist."""
    frames = list(_GRAPH_FRAME.finditer(text))
    return frames[next((i for i, f in enumerate(frames) if f["file"].startswith(_TFDIST)), 0) :]


def _reason(text: str) -> str:
    """Returns an operation's message, without the names of nodes that follow."""
    reason = re.split(r"\n\s*\[\[", text)[0].strip()
    return f"{reason[:_MAX_REASON]} …" if len(reason) > _MAX_REASON else reason


def _python_traceback(error: BaseException) -> str:
    """Extracts from TensorFlow's message the traceback of Python code that it ran; empty where it did not."""
    _, found, text = str(error).rpartition("Traceback (most recent call last):\n")
    return text if found and _is_graph_failure(error) else ""


def _is_graph_failure(error: BaseException) -> bool:
    return type(error).__module__.startswith("tensorflow.") and any(sign in str(error) for sign in _GRAPH_SIGNS)
