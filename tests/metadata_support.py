"""A metadata server on localhost that answers as Google's documentation of the real one says.

https://cloud.google.com/compute/docs/metadata/querying-metadata: requests need the header `Metadata-Flavor: Google`
(403 without), answers bear it too and an ETag; `wait_for_change=true` holds the answer back until the value's ETag is
not `last_etag` any more, or `timeout_sec` is up, when the value is sent as it is; unknown keys get 404.
"""

from __future__ import annotations

import hashlib
import http.server
import threading
import urllib.parse
from types import TracebackType
from typing import Any

PREFIX = "/computeMetadata/v1/instance/"


class MetadataServer:
    """Context manager; `values` are the keys it knows, `waiting` how many requests it holds back just now."""

    def __init__(self, **values: str) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"} | values
        self.requests: list[str] = []
        self.changed = threading.Condition()
        self.waiting = 0
        self.broken = False  # answers 503 then

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait_until(self, condition: Any, seconds: float = 30) -> None:
        """Waits until `condition()` holds; it is looked at whenever a request comes or goes."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout=seconds), self.requests

    def __enter__(self) -> MetadataServer:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def etag_of(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def _handler(server: MetadataServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            key = url.path.removeprefix(PREFIX)
            query = dict(urllib.parse.parse_qsl(url.query))
            with server.changed:
                server.requests.append(self.path)
                server.changed.notify_all()
                broken = server.broken
            if self.headers.get("Metadata-Flavor") != "Google":
                return self._answer(403, "Missing required header: Metadata-Flavor")
            if broken:
                return self._answer(503, "try again")
            if not url.path.startswith(PREFIX) or key not in server.values:
                return self._answer(404, "not found")
            self._answer(200, self._value(key, query))

        def _value(self, key: str, query: dict[str, str]) -> str:
            with server.changed:
                if query.get("wait_for_change") == "true":
                    before = query.get("last_etag", etag_of(server.values[key]))
                    server.waiting += 1
                    server.changed.notify_all()
                    seconds = float(query["timeout_sec"]) if "timeout_sec" in query else None
                    server.changed.wait_for(lambda: etag_of(server.values[key]) != before, timeout=seconds)
                    server.waiting -= 1
                return server.values[key]

        def _answer(self, status: int, text: str) -> None:
            try:
                self.send_response(status)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Type", "application/text")
                self.send_header("Content-Length", str(len(text)))
                if status == 200:
                    self.send_header("ETag", etag_of(text))
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:  # the client went away, as it may
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
