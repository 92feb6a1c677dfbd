#!/usr/bin/env python3
"""Writes the kinds of error into docs/errors.md, from their table.

python tools/errors_page.py
"""

from __future__ import annotations

import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from marked_page import fill_page  # noqa: E402 (found only now)

from tfdist import errors  # noqa: E402
from tfdist.error_ids import BUG, SYMPTOMS  # noqa: E402

PAGE = REPOSITORY / "docs" / "errors.md"
BEGIN, END = "<!-- the kinds begin -->", "<!-- the kinds end -->"


def render_page() -> str:
    """The page's text with a section for each symptom, and in it one for each id."""
    classes = [each for each in vars(errors).values() if hasattr(each, "error_id")]
    statuses = {each.error_id: each.exit_status for each in classes}
    statuses |= {"store-unreachable": errors.EXIT_STORE_UNAVAILABLE, BUG: errors.EXIT_BUG}
    lines: list[str] = []
    for symptom, kinds in SYMPTOMS.items():
        lines += [f"## {symptom}", ""]
        for error_id, text in kinds.items():
            lines += [f"### {error_id}", "", f"{text} Status {statuses.get(error_id, errors.EXIT_USER_ERROR)}.", ""]
    return fill_page(PAGE, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    PAGE.write_text(render_page())
