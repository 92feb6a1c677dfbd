"""A metadata server on localhost that answers as Google's documentation of the real one says.

https://cloud.google.com/compute/docs/metadata/querying-metadata: requests need the header `Metadata-Flavor: Google`
(403 without), answers bear it too; unknown keys get 404.
"""

from __future__ import annotations

import http.server
import threading
from typing import Any

PREFIX = "/computeMetadata/v1/instance/"


class MetadataServer:
    """Context manager; `values` are the keys it knows."""

    def __init__(self, **values: str) -> None:
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"} | values
        self.requests: list[str] = []
        self.changed = threading.Condition()
        self.broken = False  # answers 503 then
        self.hangs = False  # never answers then

    def wait_until(self, condition: Any, seconds: float = 30) -> None:
        """Waits until `condition()` holds; it is looked at whenever a request comes."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout=seconds), self.requests

    def __enter__(self) -> MetadataServer:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(server: MetadataServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with server.changed:
                server.requests.append(self.path)
                server.changed.notify_all()
            if server.hangs:
                threading.Event().wait()
            key = self.path.removeprefix(PREFIX)
            if self.headers.get("Metadata-Flavor") != "Google":
                self._answer(403, "Missing required header: Metadata-Flavor")
            elif server.broken:
                self._answer(503, "try again")
            elif key == self.path or key not in server.values:
                self._answer(404, "not found")
            else:
                self._answer(200, server.values[key])

        def _answer(self, status: int, text: str) -> None:
            try:
                self.send_response(status)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Type", "application/text")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:  # the client went away, as it may
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
