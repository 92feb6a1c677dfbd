"""A file of fitted values that was damaged is one message that names it."""

from __future__ import annotations

import pathlib

import pytest

from tfdist.data.sources.preprocessing import read_kept
from tfdist.data.tables import tables
from tfdist.data.text import text
from tfdist.errors import UserError


@pytest.mark.parametrize(
    "content", ["", "[]", "[" * 100_000, "{}", '{"vocabularies": {"a": 5}}', '{"means": {"a": "x"}}']
)
def test_what_is_no_fit_is_told(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "table-0.json"
    path.write_text(content)
    understands = [text._understood] if content == "{}" else [text._understood, tables._understood]
    for understand in understands:
        with pytest.raises(UserError, match=r"table-0\.json is damaged"):
            read_kept(str(path), understand)
