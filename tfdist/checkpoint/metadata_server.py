"""Listens to the metadata server of Google Compute Engine and Cloud TPU for the notice that this VM will end.

Invariant: only what ends the VM counts (a preemption, maintenance that terminates), not a live migration; where there
is no such server nothing is asked, and neither `start` nor `close` waits for an answer. What it answers:
https://cloud.google.com/compute/docs/metadata/querying-metadata and …/getting-live-migration-notice.
"""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import socket
import threading
import urllib.parse
from collections.abc import Callable

DEFAULT_ADDRESS = "metadata.google.internal"
PRODUCT_NAME_FILE = pathlib.Path("/sys/class/dmi/id/product_name")
# What each key says when this VM is about to end.
ENDING_VALUES = {
    "preempted": {"TRUE": "this VM is being preempted"},
    "maintenance-event": {"TERMINATE_ON_HOST_MAINTENANCE": "this VM will be terminated for maintenance of its host"},
}
HANG_SECONDS = 60  # how long the server may hold an answer back while nothing changes
ANSWER_SECONDS = 10  # what it may take beyond that
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # after a failure, doubled from the one to the other
FAILURES_BEFORE_TROUBLE = 3


def find_address(given: str | None = None, *, product_name_file: pathlib.Path = PRODUCT_NAME_FILE) -> str | None:
    """The server's `host` or `host:port`: the one given, or the usual one on a machine of Google's, or None."""
    if given:
        return given
    try:
        product = product_name_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return DEFAULT_ADDRESS if product.strip().startswith("Google") else None


class MetadataWatch:
    """Daemon threads, one a key, that wait for the server to say that this VM ends.

    Args:
      address: `host` or `host:port` of the server; proxies are not used, as Google's documentation asks.
      on_notice: called from one of the threads, at most once a key, with a clause such as "this VM is being preempted".
      on_trouble: called from one of the threads, at most once, with a sentence, when the server does not answer.
    """

    def __init__(self, address: str, *, on_notice: Callable[[str], None], on_trouble: Callable[[str], None]) -> None:
        self._address = address
        self._on_notice = on_notice
        self._on_trouble = on_trouble
        self._trouble_told = False
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[str, http.client.HTTPConnection] = {}

    def start(self) -> None:
        for key in ENDING_VALUES:
            threading.Thread(target=self._watch, args=(key,), name=f"tfdist-{key}", daemon=True).start()

    def close(self) -> None:
        """Ends the threads, those that wait for an answer too; does not wait for them."""
        self._closing.set()
        with self._lock:
            for connection in self._connections.values():
                _shut_down(connection)

    def _watch(self, key: str) -> None:
        etag: str | None = None
        failures = 0
        while not self._closing.is_set():
            try:
                value, received = self._ask(key, etag)
            except (OSError, http.client.HTTPException) as error:
                if self._closing.is_set():
                    return
                etag = None
                failures += 1
                if failures == FAILURES_BEFORE_TROUBLE:
                    self._tell_trouble(key, error)
                self._closing.wait(min(FIRST_PAUSE_SECONDS * 2 ** min(failures - 1, 10), LONGEST_PAUSE_SECONDS))
                continue
            failures = 0
            reason = ENDING_VALUES[key].get(value)
            if reason is not None:
                self._on_notice(reason)
                return
            if received == etag:  # the time was up; a server that does not know how to wait is not asked in a hurry
                self._closing.wait(FIRST_PAUSE_SECONDS)
            etag = received

    def _ask(self, key: str, etag: str | None) -> tuple[str, str]:
        """The key's value and its ETag: at once when `etag` is None or another, else when it changes or time is up."""
        query = {} if etag is None else {"wait_for_change": "true", "timeout_sec": HANG_SECONDS, "last_etag": etag}
        path = f"/computeMetadata/v1/instance/{key}?{urllib.parse.urlencode(query)}"
        connection = http.client.HTTPConnection(self._address, timeout=ANSWER_SECONDS + HANG_SECONDS * bool(query))
        try:
            connection.connect()
            with self._lock:
                if self._closing.is_set():
                    raise ConnectionAbortedError("closing")
                self._connections[key] = connection
            connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace").strip()
            if answer.status != http.client.OK or answer.headers.get("Metadata-Flavor") != "Google":
                raise http.client.HTTPException(f"it answered {answer.status} {answer.reason} to GET {path}")
            received = answer.headers.get("ETag")
            if received is None:
                raise http.client.HTTPException(f"its answer to GET {path} has no ETag")
            return text, received
        finally:
            with self._lock:
                self._connections.pop(key, None)
            connection.close()

    def _tell_trouble(self, key: str, error: Exception) -> None:
        with self._lock:
            told, self._trouble_told = self._trouble_told, True
        if not told:
            self._on_trouble(
                f"The metadata server at {self._address} does not tell {key!r}: {str(error) or type(error).__name__}. "
                "Until it does, only a signal tells this process that its VM will end."
            )


def _shut_down(connection: http.client.HTTPConnection) -> None:
    """Wakes the thread that reads from it; closing the descriptor would not."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):  # it is closed already, which is as good
            connection.sock.shutdown(socket.SHUT_RDWR)
