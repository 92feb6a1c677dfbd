"""What a supervisor makes of a worker's files when no worker wrote them."""

from __future__ import annotations

import pathlib

import pytest

from tfdist.telemetry import heartbeat


@pytest.mark.parametrize("content", [b"", b"x", b"[" * 100_000, b"[]", b"5", b"\xff" * 400, bytes(400)])
def test_they_are_taken_for_nothing(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "0.heartbeat"
    path.write_bytes(content)
    path.with_name("0.heartbeat.facts").write_bytes(content)
    assert heartbeat.read(path) is None and heartbeat.read_facts(path) == {}
