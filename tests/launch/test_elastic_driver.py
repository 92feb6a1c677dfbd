"""What an elastic worker makes of answers that no driver of Horovod's gives: nothing, or one message."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from tfdist.errors import PeerLostError
from tfdist.launch.horovod.elastic_driver import Driver

pytestmark = pytest.mark.slow

PLACE = {f"HOROVOD_{name}": "0" for name in ("RANK", "LOCAL_RANK", "CROSS_RANK")}
PLACE |= {f"HOROVOD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE", "CROSS_SIZE")}


@pytest.fixture
def answers() -> Iterator[tuple[dict[str, bytes], Driver]]:
    """A driver, and what it answers by the last part of the path."""
    given: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = given.get(self.path.rpartition("/")[2], b"")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            **PLACE,
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_HOSTNAME": "h",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        }
        yield given, Driver(environment)
        server.shutdown()


def test_a_word_of_another_worker_is_taken_only_as_one_leaves_it(answers: tuple[dict[str, bytes], Driver]) -> None:
    given, driver = answers
    given["stop"] = b'{"status": 3, "worker": 1, "host": "h"}'
    assert driver.told("stop", "status", "worker", "host") == {"status": 3, "worker": 1, "host": "h"}
    for wrong in (
        b"",
        b"x",
        b"5",
        b"[" * 60_000,
        b'{"status": 3}',
        b'{"status": "3", "worker": 1, "host": "h"}',
        b'{"status": 3, "worker": {}, "host": "h"}',
        b'{"status": 3, "worker": 1, "host": "\\u001b[2J"}',
        b'{"status": 3, "worker": 1, "host": "' + b"h" * 100_000 + b'"}',
    ):
        given["stop"] = wrong
        assert driver.told("stop", "status", "worker", "host") is None, wrong[:60]


def test_a_place_that_is_none_is_one_message(answers: tuple[dict[str, bytes], Driver]) -> None:
    given, driver = answers
    given["h:0"] = b"0,2,0,1,0,2"
    assert driver.next_place(5.0).size == 2
    for wrong in (b"", b"a,b", b"1,2", b"0,2,0,1,0,2,7"):
        given["h:0"] = wrong
        with pytest.raises(PeerLostError, match="gave no place"):
            driver.next_place(5.0)
