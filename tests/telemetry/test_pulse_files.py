"""What a supervisor makes of a worker's files when no worker wrote them."""

from __future__ import annotations

import pathlib

import pytest

from tfdist.telemetry import pulse


@pytest.mark.parametrize("content", [b"", b"x", b"[" * 100_000, b"[]", b"5", b"\xff" * 400, bytes(400)])
def test_they_are_taken_for_nothing(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "0.pulse"
    path.write_bytes(content)
    path.with_name("0.pulse.facts").write_bytes(content)
    assert pulse.read(path) is None and pulse.read_facts(path) == {}
