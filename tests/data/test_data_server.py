"""A data service against connections that are broken, silent or hostile, on real sockets, in one process."""

from __future__ import annotations

import gc
import json
import pathlib
import socket
import struct
import threading
from typing import Any

import numpy as np
import pytest
import support

from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline import connections, serving
from tfdist.data.pipeline.pipeline import build_pipeline
from tfdist.data.pipeline.served import Link, Served
from tfdist.data.pipeline.serving import DataServer
from tfdist.errors import UserError
from tfdist.strategies.base import Topology

SOON = 60.0
ARRAYS = (np.arange(24, dtype=np.float32).reshape(12, 2), np.arange(12))
PLAN = BatchPlan(num_examples=12, global_batch_size=4, num_replicas=1, shuffle_seed=3)
ALONE = Topology(worker_index=0, num_workers=1, num_local_replicas=1)


@pytest.fixture(scope="module")
def address() -> str:
    """Of a service that takes two connections beside the one that it waits for."""
    port = support.free_ports(1)[0]
    place = f"127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "MOST_CONNECTIONS", 3)
        server = DataServer(lambda: Served(lambda: ARRAYS, services=[place]), port=port)
    threading.Thread(target=server.serve, daemon=True).start()
    return place


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), SOON)


def first_batch(served: Served) -> Any:
    """What the service gives as the first batch; the pipeline is forgotten with it."""
    return next(iter(build_pipeline(served, PLAN, ALONE).as_numpy_iterator()))["examples"]


def request(**changes: Any) -> bytes:
    plan = {"num_examples": 12, "global_batch_size": 4, "num_replicas": 1, "num_microbatches": 1, "shuffle_seed": 3}
    plan |= {"drop_remainder": False, "pad": False, "any_order": False}
    topology = {"worker_index": 0, "num_workers": 1, "num_local_replicas": 1}
    asked = {"plan": plan, "topology": topology, "first_step": 0, "turn": 0, "of": 1, "fitted": "", "identity": ""}
    return json.dumps(asked | changes).encode() + b"\n"


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"[" * 60_000 + b"\n",
        b"{}\n",
        b"5\n",
        b"\xff\xfe\n",
        request(plan={"num_examples": 12}),
        request(topology={"worker_index": "0", "num_workers": 1, "num_local_replicas": 1}),
        request(turn=3),
        request(first_step=-1),
        request(fitted=["x"]),
        request(identity="another"),
        request(identity="another", fitted="/etc"),
    ],
)
def test_a_connection_that_asks_for_nothing_sound_is_told_and_ends_alone(address: str, said: bytes) -> None:
    with connected(address) as connection:
        connection.sendall(said)
        answer = json.loads(connections.read_line(connection, SOON, 1 << 16))
        assert answer.keys() == {"error"}
        assert connection.recv(1) == b""


def test_a_request_without_end_is_not_read_to_its_end(address: str) -> None:
    with connected(address) as connection, pytest.raises(OSError, match=r"Broken pipe|reset"):
        while True:
            connection.sendall(b"x" * serving.MOST_REQUEST_BYTES)


@pytest.mark.slow
def test_neither_a_reset_nor_a_silent_connection_holds_up_the_others(address: str) -> None:
    for _ in range(10):
        broken = connected(address)
        broken.sendall(b'{"plan": ')
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        broken.close()  # resets it
    served = Served(lambda: ARRAYS, services=[address])
    with connected(address):  # and says nothing
        x, _ = first_batch(served)
    assert x.shape == (4, 2)


@pytest.mark.slow
def test_a_served_that_is_forgotten_frees_its_place_in_the_service(address: str) -> None:
    for _ in range(5):  # more than there are places
        served = Served(lambda: ARRAYS, services=[address])
        assert len(first_batch(served)[1]) == 4
        del served
        gc.collect()


def test_what_a_run_has_fitted_is_read_and_nothing_is_written_beside_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "fitted").mkdir()
    (tmp_path / "fitted" / "text-0.json").write_text("{}")
    with serving._copied(str(tmp_path / "fitted")) as copy:
        assert pathlib.Path(copy, "text-0.json").read_text() == "{}"
        pathlib.Path(copy, "more").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["fitted", "text-0.json"]
    for number in range(serving.MOST_FITTED_FILES + 1):
        (tmp_path / "fitted" / f"{number}").write_text("")
    with pytest.raises(UserError, match="holds too much"), serving._copied(str(tmp_path / "fitted")):
        pass


@pytest.mark.slow
def test_what_answers_and_is_no_service_is_one_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(said: bytes) -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.sendall(said)
            connection.close()

        for said in (b"[" * 60_000 + b"\n", b"", b"HTTP/1.1 400 Bad Request\r\n", b'{"port": "x"}\n', b"x" * 70_000):
            thread = threading.Thread(target=answer, args=(said,))
            thread.start()
            with pytest.raises(UserError, match="cannot be reached"):
                Link(f"127.0.0.1:{listener.getsockname()[1]}", {})
            thread.join()
