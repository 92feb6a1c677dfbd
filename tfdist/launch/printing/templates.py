"""Fills the templates of tfdist/schedulers/, which people may read and copy, too.

Invariant: a name that a template uses and nobody gives is an error, not an empty text.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from tfdist.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER_ERROR
from tfdist.requirements import missing_requirement

STATUSES = {
    "DONE": EXIT_DONE,
    "USER_ERROR": EXIT_USER_ERROR,
    "DIVERGED": EXIT_DIVERGED,
    "PREEMPTED": EXIT_PREEMPTED,
}


def fill(name: str, **values: Any) -> str:
    """The text of a template with `values`, and the exit statuses by the names of STATUSES.

    Raises:
      UserError: Jinja is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise missing_requirement("jinja2") or error from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdist", "schedulers"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, "shell": shell, "text": _yaml_text, "python": _json_text}
    return environment.get_template(f"{name}.jinja").render(STATUSES | values)


def shell(words: Sequence[str], *, indent: str = "    ", width: int = 110) -> str:
    """Words quoted for a shell, over several lines where one would be long."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return f" \\\n{indent}".join(lines)


def _yaml_text(text: str) -> str:
    """A text as YAML reads it back, whatever is in it."""
    if '"' in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return _json_text(text)


def _json_text(value: Any) -> str:
    """A text, or a list or dict of texts, as JSON, which is YAML and Python as well."""
    return json.dumps(value, ensure_ascii=False)
