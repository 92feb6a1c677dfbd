"""Processes of a Horovod run that meet, or do not, at the store that horovodrun keeps."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator

import pytest

from tfdist.errors import EXIT_PEER_LOST, PeerLostError
from tfdist.strategies.cluster import horovod_rendezvous
from tfdist.strategies.cluster.horovod_rendezvous import Store, meet

pytestmark = [pytest.mark.horovod, pytest.mark.slow]


@pytest.fixture
def port() -> Iterator[int]:
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init([])
    yield port
    server.stop()


def test_all_go_on_once_the_last_has_come(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_rendezvous, "FIRST_WORD_SECONDS", 0.3)
    said: list[str] = []
    told = threading.Event()

    def on_wait(message: str) -> None:
        said.append(message)
        told.set()

    def join(rank: int) -> float:
        meet(Store("127.0.0.1", port, rank, 3), timeout_seconds=30.0, on_wait=on_wait)
        return time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        early = [pool.submit(join, rank) for rank in (0, 1)]
        assert told.wait(20)
        came = time.monotonic()
        pool.submit(join, 2).result(20)
        assert all(each.result(20) >= came for each in early)
    assert set(said[:2]) <= {"waiting for worker 2", "waiting for worker 1, worker 2", "waiting for worker 0, worker 2"}
    assert "waiting for worker 2" in said


def test_who_does_not_come_is_named_with_status_4(port: int) -> None:
    with pytest.raises(PeerLostError, match=r"waited 0\.5 s and gives up; missing: worker 0, worker 2\.") as error:
        meet(Store("127.0.0.1", port, 1, 3), timeout_seconds=0.5, on_wait=lambda message: None)
    assert error.value.exit_status == EXIT_PEER_LOST


def test_a_horovodrun_that_is_gone_is_named(port: int) -> None:
    with pytest.raises(PeerLostError, match=r"horovodrun, which does not answer at 127\.0\.0\.1:1 "):
        meet(Store("127.0.0.1", 1, 1, 3), timeout_seconds=0.3, on_wait=lambda message: None)
