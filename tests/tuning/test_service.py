"""The service between the chief of a sweep and its workers, against those who have no business there: real sockets."""

from __future__ import annotations

import contextlib
import json
import pathlib
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import pytest
import support

from tfdist.errors import EXIT_USER_ERROR, UserError
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.cluster import handshake, wire
from tfdist.tuning.cluster.chief_link import ChiefLink
from tfdist.tuning.cluster.chief_server import ChiefServer, News
from tfdist.tuning.cluster.remote_places import RemotePlaces, Treaty
from tfdist.tuning.cluster.remote_worker import RemoteWorker
from tfdist.tuning.cluster.role import Role
from tfdist.tuning.schedule.workers import Place
from tfdist.tuning.search import space
from tfdist.tuning.search.space import Space

SECRET = b"a secret of this sweep alone"
IDENTITY = {"objective": "val_loss"}
LEASE = uuid.uuid4().hex
HELLO = {"kind": "hello", "worker": uuid.uuid4().hex, "name": "tuner0", "places": 1, "identity": IDENTITY, "held": []}
START = {"kind": "start", "lease": LEASE, "key": "0000", "values": {}, "seed": 0, "stop_after_epochs": None}
SOON = 30.0


@contextlib.contextmanager
def listening(secret: bytes = SECRET) -> Iterator[tuple[ChiefServer, str]]:
    address = f"127.0.0.1:{support.free_ports(1)[0]}"
    server = ChiefServer(address, source="the test", secret=secret, wake=lambda: None)
    try:
        yield server, address
    finally:
        server.close()


def talk(address: str, *said: bytes | Mapping[str, Any], secret: bytes | None = None) -> list[dict[str, Any]]:
    """Says all of this on a connection of its own, after a handshake if there is a secret, and gives the answers."""
    outbound: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers = []
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.stream_stream(wire.METHOD)(iter(outbound.get, None), timeout=SOON)
        if secret is not None:
            nonce = handshake.new_nonce()
            outbound.put(wire.encode({"kind": "knock", "version": wire.VERSION, "nonce": nonce}))
            given = wire.decode(next(call), wire.CHALLENGE)["nonce"]
            proof = handshake.prove(secret, handshake.WORKER, worker_nonce=nonce, chief_nonce=given)
            outbound.put(wire.encode({"kind": "proof", "proof": proof}))
        for each in said:
            outbound.put(each if isinstance(each, bytes) else json.dumps(each).encode())
        outbound.put(None)
        with contextlib.suppress(grpc.RpcError):
            answers = [wire.decode(each) for each in call]
    return answers


def next_news(server: ChiefServer) -> News:
    give_up = time.monotonic() + SOON
    while time.monotonic() < give_up:
        for news in server.take():
            return news
        time.sleep(0.01)
    raise AssertionError("nothing came")


@pytest.mark.parametrize(
    "wrong",
    [
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"kind": "order"}',
        b'{"kind": ["hello"]}',
        b'{"kind": "renew", "number": NaN}',
        b'{"kind": "renew", "number": ' + b"9" * 5000 + b"}",
        json.dumps(HELLO | {"identity": "val_loss"}).encode(),
        json.dumps(HELLO | {"name": "\x1b[2J"}).encode(),
        json.dumps(HELLO | {"places": 10**6}).encode(),
        json.dumps(HELLO | {"held": [START | {"key": "../.."}]}).encode(),
        json.dumps(HELLO | {"held": ["lease"]}).encode(),
        json.dumps(START | {"key": "../../elsewhere"}).encode(),
        json.dumps(START | {"key": "/etc"}).encode(),
        json.dumps(START | {"key": "0000\n"}).encode(),
        json.dumps(START | {"seed": "0\nimport subprocess"}).encode(),
        json.dumps(START | {"values": ["train.seed = 1"]}).encode(),
        json.dumps({"kind": "ended", "lease": LEASE, "status": True, "log": "", "seconds": 1}).encode(),
        json.dumps({"kind": "stop", "lease": {}}).encode(),
        b'{"kind": "refused", "message": "' + b"x" * wire.MOST_BYTES + b'"}',
    ],
)
def test_what_is_no_message_is_refused(wrong: bytes) -> None:
    with pytest.raises(wire.NoMessage):
        wire.decode(wrong)


def test_nobody_ends_a_chief_and_only_who_has_the_secret_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as (server, address):
        treaty = Treaty(IDENTITY, uuid.uuid4().hex, 30.0)
        places = RemotePlaces(server, treaty, first=0, claim=lambda *given: None, notify=lambda text: None)
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as foreign:
            foreign.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for said in (b"\xff", b"[" * 100_000, HELLO, {"kind": "hello", "version": 1}):
            (refused,) = talk(address, said)
            assert refused["kind"] == wire.REFUSED and "no message of a sweep" in refused["message"]
        assert talk(address, secret=b"another")[-1]["message"] == wire.OTHER_SECRET
        assert not list(places.ended()) and places.num_free == 0
        for said in (b"\xff", HELLO | {"identity": "val_loss"}, HELLO | {"held": [START | {"key": "../.."}]}):
            (refused,) = talk(address, said, secret=SECRET)
            assert "no message of a sweep" in refused["message"]
        assert not list(places.ended())

        link = ChiefLink(address, secret=SECRET, wake=lambda: None)
        link.connect(HELLO)
        heard: list[Any] = []
        give_up = time.monotonic() + SOON
        while not heard and time.monotonic() < give_up:
            assert not list(places.ended())
            heard += link.take()
        link.close()
    assert heard[0]["kind"] == wire.WELCOME
    assert "refused a connection from ipv4:127.0.0.1" in caplog.text
    assert SECRET.decode() not in caplog.text


def test_a_worker_says_nothing_to_a_chief_without_the_secret() -> None:
    with listening(b"another one, of an impostor") as (server, address):
        link = ChiefLink(address, secret=SECRET, wake=lambda: None)
        link.connect(HELLO)
        heard: list[Any] = []
        give_up = time.monotonic() + SOON
        while len(heard) < 2 and time.monotonic() < give_up:
            heard += link.take()
            time.sleep(0.01)
        link.close()
        assert heard[0] == {"kind": wire.REFUSED, "message": wire.OTHER_SECRET}
        assert not list(server.take())


class Places:
    """One place of a worker, which notes what it is to start; each trial ends at once, well."""

    num_places = num_free = 1

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.running: list[Any] = []
        self._ready, self._readable = socket.socketpair()

    def fileno(self) -> int:
        return self._readable.fileno()

    def start(self, job: Any, parameters: list[str]) -> None:
        self.started.append(parameters)

    def ended(self) -> list[Any]:
        return []

    def close(self) -> None:
        self._ready.close()
        self._readable.close()


def test_a_worker_takes_values_of_its_own_space_and_no_gin_text(tmp_path: pathlib.Path) -> None:
    own = Space(
        {
            "optimizer.rate": space.log_uniform(0.1, 1.0),
            "train.optimizer": space.choice(["@keras.optimizers.Adam", "@keras.optimizers.SGD"]),
        }
    )
    hostile = [
        {"optimizer.rate": "@subprocess.check_output()"},
        {"optimizer.rate": "0.5\nimport subprocess"},
        {"optimizer.rate": 0.5, "optimizer.rate = 1\nimport subprocess": 1},
        {"train.optimizer": "@subprocess.Popen"},
        {"train.optimizer": "%MACRO"},
        {"train.run": True},
    ]
    sound = {"optimizer.rate": 0.5, "train.optimizer": "@keras.optimizers.SGD"}
    mark = uuid.uuid4().hex
    directory = RunDirectory(str(tmp_path))
    pathlib.Path(directory.sweep_mark).write_text(mark)
    places, ends = Places(), []

    def lead(server: ChiefServer) -> None:
        hello = next_news(server)
        assert hello.message["kind"] == wire.HELLO
        server.send(hello.session, {"kind": wire.WELCOME, "lease_seconds": 600.0, "mark": mark, "kept": []})
        assert next_news(server).message["kind"] == wire.READY
        for values in hostile:
            lease = uuid.uuid4().hex
            server.send(hello.session, START | {"lease": lease, "values": values, "seed": 7})
            while (said := next_news(server).message)["kind"] == wire.RENEW:
                pass
            ends.append(said)
            server.send(hello.session, {"kind": wire.NOTED, "lease": lease})
        server.send(hello.session, START | {"lease": uuid.uuid4().hex, "values": sound, "stop_after_epochs": 2})
        server.send(hello.session, {"kind": wire.OVER, "status": 0, "message": "the sweep has ended"})

    with listening() as (server, address), contextlib.closing(places):
        chief = threading.Thread(target=lead, args=(server,))
        chief.start()
        worker = RemoteWorker(
            Role("tuner0", address, "the test", is_chief=False, trains=True, secret=SECRET),
            places,
            run_dir=str(tmp_path),
            space=own,
            seed=0,
            identity=IDENTITY,
            patience_seconds=SOON,
            notify=lambda text: None,
        )
        worker.run()
        chief.join()
    assert [(end["kind"], end["status"]) for end in ends] == [(wire.ENDED, EXIT_USER_ERROR)] * len(hostile)
    assert all("is no setting that this sweep searches" in e["log"] or "not in its range" in e["log"] for e in ends)
    assert places.started == [
        ["optimizer.rate = 0.5", "train.optimizer = @keras.optimizers.SGD", "train.stop_after_epochs = 2"]
    ]


def test_a_value_that_rounding_puts_beyond_its_range_is_received() -> None:
    own = Space({"rate": space.uniform(0.1, 0.3, step=0.1)})
    assert own.received({"rate": 0.1 + 2 * 0.1}) == {"rate": 0.30000000000000004}
    with pytest.raises(UserError, match="not in its range"):
        own.received({"rate": 0.31})


def test_a_worker_keeps_only_the_lease_of_a_trial_that_exists() -> None:
    with listening() as (server, address):
        asked: list[tuple[str, Place]] = []
        places = RemotePlaces(
            server,
            Treaty(IDENTITY, uuid.uuid4().hex, 30.0),
            first=0,
            claim=lambda key, settings, place: asked.append((key, settings.values)),
            notify=lambda text: None,
        )
        talk(address, HELLO | {"held": [START | {"key": "0003-seed-1", "values": {"rate": 1}}]}, secret=SECRET)
        give_up = time.monotonic() + SOON
        while not asked and time.monotonic() < give_up:
            assert not list(places.ended())
    assert asked == [("0003-seed-1", {"rate": 1})]
