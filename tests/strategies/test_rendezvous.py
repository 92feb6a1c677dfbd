"""Workers that meet, or do not, as real processes over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
from processes import Running

from tfdist.errors import EXIT_PEER_LOST, EXIT_USER_ERROR
from tfdist.launch.local_workers import reserve_port, tf_config
from tfdist.strategies.cluster import rendezvous
from tfdist.strategies.cluster.rendezvous import Meeting
from tfdist.strategies.cluster.tf_config import Cluster

KEPT: list[socket.socket] = []  # connections that nobody answers
Start = Callable[..., Running]
WORKER = """
import os, sys
from tfdist import errors
from tfdist.strategies.cluster import rendezvous, tf_config
try:
    rendezvous.rendezvous(
        tf_config.read_tf_config(os.environ),
        timeout_seconds=float(sys.argv[1]),
        on_wait=lambda message: print(message, flush=True),
    )
except errors.TfdistError as error:
    print(error, flush=True)
    sys.exit(error.exit_status)
print("met", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker with a TF_CONFIG."""
    with contextlib.ExitStack() as stack:

        def start(config: str, timeout_seconds: float = 30.0) -> Running:
            command = [sys.executable, "-c", WORKER, str(timeout_seconds)]
            log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
            return stack.enter_context(Running(command, log, {"TF_CONFIG": config}))

        yield start


@pytest.fixture
def addresses() -> Iterator[Callable[[int], list[str]]]:
    """Free ports, kept from all but those who listen with SO_REUSEADDR."""
    with contextlib.ExitStack() as stack:
        yield lambda n: [f"127.0.0.1:{stack.enter_context(reserve_port()).getsockname()[1]}" for _ in range(n)]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def end_of(process: Running) -> tuple[int, str]:
    return process.end(), process.output


def next_line(process: Running, seen: str = "") -> str:
    """Waits for a line behind the output that was seen."""
    process.until(lambda: "\n" in process.output.removeprefix(seen))
    return process.output.removeprefix(seen).splitlines(keepends=True)[0]


@contextlib.contextmanager
def listener(address: str, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Something that is no worker listens at `address` and gives each connection to `serve`."""
    with socket.create_server(("127.0.0.1", port_of(address))) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_workers_started_together_meet_every_time_and_leave_their_ports_free(start: Start, addresses) -> None:
    cluster = addresses(4)
    for _ in range(4):
        started = [start(tf_config(cluster, index)) for index in range(4)]
        assert [end_of(process) for process in started] == [(0, "met\n")] * 4
    for address in cluster:
        socket.create_server(("127.0.0.1", port_of(address))).close()


def test_a_large_cluster_meets() -> None:
    with reserve_port() as held:
        port = held.getsockname()[1]
    addresses = tuple(f"127.0.0.{index + 1}:{port}" for index in range(70))
    meetings = [Meeting(Cluster(addresses, "worker", index), 300.0, print) for index in range(70)]

    async def hold() -> None:
        await asyncio.gather(*(meeting.meet() for meeting in meetings))

    asyncio.run(hold())


@pytest.mark.slow
def test_localhost_and_a_chief_task_do_as_well(start: Start, addresses) -> None:
    first, second = (f"localhost:{port_of(address)}" for address in addresses(2))
    jobs = {"chief": [first], "worker": [second]}
    started = [start(json.dumps({"cluster": jobs, "task": {"type": job, "index": 0}})) for job in ("worker", "chief")]
    assert [end_of(process) for process in started] == [(0, "met\n")] * 2


@pytest.mark.slow
def test_who_is_late_is_named_and_who_dies_while_waiting_can_be_started_again(start: Start, addresses) -> None:
    cluster = addresses(3)
    first, third = (start(tf_config(cluster, index)) for index in (0, 2))
    said = f"waiting for worker 1 at {cluster[1]} (nothing listens there yet)\n"
    assert [next_line(process) for process in (first, third)] == [said] * 2
    third.kill()
    assert "worker 2" in next_line(first, said)
    again = [start(tf_config(cluster, index)) for index in (1, 2)]
    assert all(status == 0 and output.endswith("met\n") for status, output in map(end_of, [first, *again]))


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_who_never_comes_is_named_at_the_end_with_status_4(index: int, start: Start, addresses) -> None:
    cluster = addresses(3)
    patient = start(tf_config(cluster, 1 - index))
    assert "worker" in next_line(patient)
    status, output = end_of(start(tf_config(cluster, index), timeout_seconds=4.0))
    assert status == EXIT_PEER_LOST
    assert f"worker {index} waited 4 s and gives up; missing: worker 2 at {cluster[2]} (nothing listens" in output
    assert f"worker {1 - index} at" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (KEPT.append, "it does not answer"),
        (lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n"), "something else than a tfdist worker"),
        (lambda connection: connection.close(), "it accepts connections and closes them"),
        (None, "the host name 'no-such-host.invalid' does not resolve"),
    ],
)
def test_what_is_at_a_peers_address_is_named(serve, why: str, start: Start, addresses) -> None:
    cluster = addresses(2) if serve else [*addresses(1), "no-such-host.invalid:2222"]
    with listener(cluster[1], serve) if serve else contextlib.nullcontext():
        seconds = 6.0 if serve == KEPT.append else 1.0
        status, output = end_of(start(tf_config(cluster, 0), timeout_seconds=seconds))
    assert status == EXIT_PEER_LOST
    assert f"missing: worker 1 at {cluster[1]} ({why}" in output


@pytest.mark.slow
def test_a_process_with_another_index_at_a_peers_address_is_named(start: Start, addresses) -> None:
    cluster = addresses(2)
    said = rendezvous.encode(index=0, workers=cluster)
    with listener(cluster[1], lambda connection: connection.sendall(said)):
        status, output = end_of(start(tf_config(cluster, 0)))
    assert status == EXIT_USER_ERROR
    assert (
        f"At {cluster[1]}, the address of worker 1, answers a process whose TF_CONFIG says that it is worker 0"
        in output
    )


@pytest.mark.slow
def test_different_clusters_are_told_to_both(start: Start, addresses) -> None:
    cluster = addresses(3)
    started = [start(tf_config(cluster, 0)), start(tf_config(cluster[:2], 1))]
    for status, output in map(end_of, started):
        assert status == EXIT_USER_ERROR
        assert "different clusters" in output and ", ".join(cluster) in output


@pytest.mark.slow
def test_a_taken_port_is_named(start: Start, addresses) -> None:
    cluster = addresses(2)
    with listener(cluster[0], lambda connection: connection.close()):
        status, output = end_of(start(tf_config(cluster, 0)))
    assert status == EXIT_USER_ERROR
    assert f"worker 0 cannot listen at its address {cluster[0]}: port {port_of(cluster[0])} of this machine" in output


@pytest.mark.slow
def test_a_port_that_is_taken_when_the_workers_have_met_is_named(addresses) -> None:
    cluster = addresses(2)
    connect = "multi_worker.rendezvous = lambda *_, **__: None\nmulti_worker.MultiWorker().connect(notify=print)"
    program = f"import tensorflow\nfrom tfdist.strategies import multi_worker\n{connect}"
    with listener(cluster[0], lambda connection: connection.close()):
        ended = support.run_python(["-c", program], env={"TF_CONFIG": tf_config(cluster, 0)})
    assert f"AddressTakenError: worker 0 cannot listen at its address {cluster[0]}: another process" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "expected"), [("", "3 threads"), ("tf.zeros(1)", "this process has made a variable, a tensor or")]
)
def test_a_worker_of_one_core_computes_beside_its_collectives(before: str, expected: str, addresses) -> None:
    program = f"""
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import tensorflow as tf
from tfdist.strategies.multi_worker import MultiWorker
{before}
MultiWorker().connect()
print(tf.config.threading.get_inter_op_parallelism_threads(), "threads")
"""
    ended = support.run_python(["-c", program], env={"TF_CONFIG": tf_config(addresses(1), 0)})
    assert expected in ended.stdout + ended.stderr
