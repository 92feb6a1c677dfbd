"""What comes in a rendezvous and is not from a worker is refused, whatever it is."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tfdist.strategies.cluster import hello

SAID = {"start": "a", "index": 1, "workers": ["a:1", "b:2"], "ready": True, "waits_for": [0]}


def test_a_worker_is_understood() -> None:
    assert hello.decode(hello.encode(**SAID))["index"] == 1


def test_a_large_cluster_is_told_in_few_bytes_and_another_one_is_told_from_it() -> None:
    workers = tuple(f"node{index}.cluster:2222" for index in range(8192))
    told = hello.listed(workers)
    line = hello.encode(**SAID | {"workers": told, "index": 8000, "waits_for": [8191]})
    assert len(line) < 512
    assert hello.decode(line)["workers"] == told
    assert told[0] == workers[0] and told[1].startswith("… and 8,191 others (digest ")
    assert told != hello.listed((*workers[:-2], workers[-1], workers[-2]))


@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": "other"},
        {"index": True},
        {"index": -1},
        {"index": 2},
        {"index": 10**30},
        {"workers": "a:1"},
        {"workers": ["a:1", 5]},
        {"workers": ["a:1", "\x1b[2J"]},
        {"waits_for": [7]},
        {"waits_for": ["0"]},
        {"waits_for": None},
        {"ready": 1},
        {"start": None},
    ],
)
def test_what_no_worker_says_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(hello.WrongPeer):
        hello.decode(json.dumps({"protocol": hello.PROTOCOL, **SAID, **changed}).encode())


def test_many_peers_may_ask_in_one_instant() -> None:
    with contextlib.ExitStack() as stack:
        (listening,) = hello.listen("127.0.0.1", 0)
        stack.enter_context(listening)
        for _ in range(300):  # one that finds the queue full hears nothing for a second
            stack.enter_context(socket.create_connection(listening.getsockname(), timeout=0.5))


@pytest.mark.parametrize("line", [b"x", b"[" * 100_000, b"5", b"[]", b"{}", b"null", b"\xff", b"9" * 5000, b"NaN"])
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(hello.WrongPeer):
        hello.decode(line)
