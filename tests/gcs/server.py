"""A Google Cloud Storage on this machine: real HTTP, generations and preconditions, and faults by request.

    python tests/gcs/server.py --port=0 --bucket=NAME

prints `STORAGE_EMULATOR_HOST=http://127.0.0.1:PORT`, which a program that is to use it needs in its environment, and
serves until it is ended. Tests use `GcsServer` as a context manager.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.server
import pathlib
import socket
import socketserver
import struct
import sys
import threading
import time
import traceback
from urllib.parse import parse_qsl, urlsplit

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from gcs import faults
from gcs.faults import Fault, Faults
from gcs.json_api import Answer, JsonApi, Request, json_error
from gcs.objects import ApiError, Buckets

SLOW_PIECE = 1 << 16  # bytes


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that came, and the kind of its fault."""

    method: str
    target: str
    fault: str | None


class GcsServer:
    """Serves from `with` to its end.

    Args:
      buckets: those that exist at the beginning.
      port: 0 for a free one.

    Attributes:
      faults: set some with `add`.
      buckets: what is stored, to look at or to fill directly.
    """

    def __init__(self, *buckets: str, port: int = 0) -> None:
        self.buckets = Buckets(*buckets)
        self.faults = Faults()
        self.closing = threading.Event()
        self._asked: list[Asked] = []
        self._lock = threading.Lock()
        self._json = JsonApi(self.buckets)
        self._http = _HttpServer(("127.0.0.1", port), _Handler)
        self._http.owner = self
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def asked(self) -> list[Asked]:
        """The requests so far, in the order of their ends."""
        with self._lock:
            return list(self._asked)

    def count(self, method: str, word: str = "") -> int:
        """How many requests had this method and `word` in path or query."""
        return sum(each.method == method and word in each.target for each in self.asked)

    def __enter__(self) -> GcsServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._http.drop_connections()
        self._thread.join()

    def record(self, asked: Asked) -> None:
        with self._lock:
            self._asked.append(asked)

    def answer(self, request: Request) -> Answer:
        """What the API answers."""
        try:
            return self._json.answer(request)
        except ApiError as error:
            return json_error(error)
        except Exception as error:  # a bug here, which no client should take for a fault that passes
            traceback.print_exc()
            return json_error(ApiError(501, "notImplemented", f"{type(error).__name__}: {error}"))


class _HttpServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    owner: GcsServer

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: set[socket.socket] = set()

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        """A server that has ended answers no more on connections that were kept alive."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that goes away is no news
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self) -> None:
        owner = self.server.owner
        fault = owner.faults.meet(self.command, self.path)
        kind = fault.kind if fault else None
        try:
            body = self._read_body(fault)
            whole = kind not in (faults.RESET_UPLOAD, faults.STALL_UPLOAD)
            request = self._request(body)
            if kind == faults.STATUS:
                error = ApiError(fault.status, "backendError", f"A fault that was asked for: {fault.status}")
                answer = json_error(error)
            elif whole:
                answer = owner.answer(request)
            lost = not whole or kind == faults.LOST_REPLY
        finally:  # before the client can know, so that it finds itself counted
            owner.record(Asked(self.command, self.path, kind))
        if lost:
            if kind == faults.STALL_UPLOAD:
                owner.closing.wait(fault.seconds)
            self._reset()
        else:
            if kind == faults.SLOW_ANSWER:
                owner.closing.wait(fault.seconds)
            self._send(answer, fault)

    do_GET = do_POST = do_DELETE = _serve

    def _request(self, body: bytes) -> Request:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        return Request(self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)

    def _read_body(self, fault: Fault | None) -> bytes:
        """All of it; half of it where the fault says so."""
        size = int(self.headers.get("Content-Length") or 0)
        halved = fault is not None and fault.kind in (faults.RESET_UPLOAD, faults.STALL_UPLOAD)
        if fault is not None and fault.kind == faults.SLOW_UPLOAD:
            return self._read_slowly(size, fault.bytes_per_second)
        body = self.rfile.read(size // 2 if halved else size)
        if not halved and len(body) < size:
            raise ConnectionResetError("the client went away")
        return body

    def _read_slowly(self, size: int, bytes_per_second: float) -> bytes:
        body, begun = bytearray(), time.monotonic()
        while len(body) < size:
            piece = self.rfile.read(min(SLOW_PIECE, size - len(body)))
            if not piece:
                raise ConnectionResetError("the client went away")
            body += piece
            self.server.owner.closing.wait(max(0.0, begun + len(body) / bytes_per_second - time.monotonic()))
        return bytes(body)

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if fault is not None and fault.kind in (faults.RESET_DOWNLOAD, faults.STALL_DOWNLOAD):
            self.wfile.write(memoryview(answer.body)[: len(answer.body) // 2])
            if fault.kind == faults.STALL_DOWNLOAD:
                self.server.owner.closing.wait(fault.seconds)
            self._reset()
        elif answer.body:
            self.wfile.write(answer.body)

    def _reset(self) -> None:
        """Ends the connection with RST, as a crash of the other side does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()

    def finish(self) -> None:
        if self.connection.fileno() >= 0:
            super().finish()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A Google Cloud Storage on this machine, to try gs:// without an account."
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--bucket", action="append", default=[], metavar="NAME", help="a bucket that exists; repeats")
    flags = parser.parse_args()
    with GcsServer(*flags.bucket, port=flags.port) as server:
        print(f"STORAGE_EMULATOR_HOST={server.address}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
