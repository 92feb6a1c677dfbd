"""Waits until every process of a Horovod run is there, before Horovod itself does.

Horovod 0.28 waits for 30 seconds without a word and then aborts the process. `horovodrun --gloo` keeps a store of keys
and values for its processes: each one puts its name there and looks for the others'.

Invariant: when one process returns, all have come as far as this; who does not come is named. Under MPI there is
nothing to do. Imports neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http
import http.client
import socket
import time
from collections.abc import Callable, Mapping

from tfdist.errors import PeerLostError, shorten_list
from tfdist.strategies import failure_report
from tfdist.strategies.failure_report import FailureReport

SCOPE = "tfdist"
FAILURE = "failure"
ASK_SECONDS = 0.1
ANSWER_SECONDS = 5.0
FIRST_WORD_SECONDS = 3.0  # before saying for whom this worker waits
NEXT_WORD_SECONDS = 30.0
MAX_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Store:
    """The address of the store at which the processes of a run meet, and which of them this one is."""

    host: str
    port: int
    rank: int
    size: int


def read_store(environment: Mapping[str, str]) -> Store | None:
    """The store that `horovodrun --gloo` keeps; None where it does not."""
    names = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK", "HOROVOD_SIZE")
    host, numbers = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), [environment.get(name, "") for name in names]
    if not host or not all(number.isdecimal() for number in numbers):
        return None
    return Store(host, *map(int, numbers))


def meet(store: Store, *, timeout_seconds: float, on_wait: Callable[[str], None]) -> None:
    """Returns when every process has come.

    Args:
      store: from `read_store`.
      timeout_seconds: how long to wait.
      on_wait: is told for whom this worker waits, after some seconds, whenever that changes, and now and then.

    Raises:
      PeerLostError: somebody did not come in time.
    """
    begun = time.monotonic()
    reported, reported_at = "", begun + FIRST_WORD_SECONDS - NEXT_WORD_SECONDS
    missing = list(range(store.size))  # itself too, until it has left its name
    while True:
        try:
            if store.rank in missing:
                _request(store, "PUT", str(store.rank), socket.gethostname().encode())
            missing = [rank for rank in missing if _request(store, "GET", str(rank))[0] != http.HTTPStatus.OK]
            if not missing:
                return
            waiting_for = ", ".join(shorten_list([f"worker {rank}" for rank in missing], MAX_NAMED))
        except (OSError, http.client.HTTPException) as error:
            waiting_for = f"horovodrun, which does not answer at {store.host}:{store.port} ({error})"
        now = time.monotonic()
        if now - begun >= timeout_seconds:
            raise PeerLostError(
                f"worker {store.rank} waited {timeout_seconds:g} s and gives up; missing: {waiting_for}. Each "
                f"has ended, hangs before it is ready, or cannot reach {store.host}:{store.port}."
            )
        is_news = waiting_for != reported and now - begun >= FIRST_WORD_SECONDS
        if is_news or now - reported_at >= NEXT_WORD_SECONDS:
            on_wait(f"waiting for {waiting_for}")
            reported, reported_at = waiting_for, now
        time.sleep(ASK_SECONDS * max(1.0, store.size / 16))


def put_failure(store: Store, report: FailureReport) -> None:
    """Stores why a worker failed, unless a worker has reported earlier; ignores connection errors."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        if get_failure(store) is None:  # the first one is the cause
            _request(store, "PUT", FAILURE, failure_report.encode(report).encode())


def get_failure(store: Store) -> FailureReport | None:
    """The report that a worker has left; None where none has."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, body = _request(store, "GET", FAILURE)
        if status == http.HTTPStatus.OK:
            return failure_report.decode(body.decode())
    return None


def _request(store: Store, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of an answer. Directly: no proxy stands between the processes of a run."""
    connection = http.client.HTTPConnection(store.host, store.port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, f"/{SCOPE}/{key}", body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
