"""A page of which a part, between two marks, is written by a program."""

from __future__ import annotations

import pathlib


def fill_page(page: pathlib.Path, begin: str, end: str, text: str) -> str:
    """The page's text with `text` between its marks; ends the program where the page lacks them."""
    head, _, rest = page.read_text().partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} lacks the lines {begin} and {end}, between which a program writes.")
    return f"{head}{begin}\n\n{text}\n{end}{tail}"
