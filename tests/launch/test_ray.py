"""Runs that the launcher ray starts on a real Ray cluster: supervised as on one machine, whatever of it is lost."""

from __future__ import annotations

import os
import pathlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import ray_cluster
import support
from crashes.runs import Run, differences
from launch.test_recovery import details, plan_faults, train, undisturbed  # noqa: F401
from ray_cluster import RayCluster

pytestmark = pytest.mark.slow

LAUNCHERS = {"multi_worker": "ray", "horovod": "ray_horovod"}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    path = os.pathsep.join([str(support.REPOSITORY / "tests"), str(support.REPOSITORY)])
    with ray_cluster.running(3, variables={"PYTHONPATH": path} | TOKEN) as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", ["multi_worker", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_workers_that_are_lost_cost_no_more_than_time(
    tmp_path: pathlib.Path,
    undisturbed: Callable[..., Run],  # noqa: F811
    cluster: RayCluster,
    strategy: str,
) -> None:
    run = Run(tmp_path / "run")
    # What hangs is noticed and stopped by the same code under both; horovodrun has its own for what dies.
    hangs = [] if strategy == "horovod" else [("stopped", 0, 14), ("blocked", 1, 27)]
    plan_faults(run.directory, ("killed", 1, 8), *hangs)
    options = (f"--launcher={LAUNCHERS[strategy]}", "--placement=spread", "--max_restarts=9", "--deadline_seconds=5")
    done = train(run.directory, strategy, options=options, variables=cluster.variables | TOKEN)
    assert done.status == 0, done.output
    assert differences(run, undisturbed(2)) == []
    assert [(event["place"], event["status"]) for event in details(run, "worker_failed")] == [(1, 137)]
    assert [event["place"] for event in details(run, "worker_hung")] == [place for _, place, _ in hangs], done.output
    if hangs:
        assert done.said("hangs: it is stopped, as by SIGSTOP")
        assert done.said("faulty.py")  # in the stacks of who is blocked
    assert len(done.said("Ray placed worker 0 on 127.0.0.")) == 2 + len(hangs)


def test_a_killed_node_costs_no_more_than_time(
    tmp_path: pathlib.Path,
    undisturbed: Callable[..., Run],  # noqa: F811
    cluster: RayCluster,
) -> None:
    run = Run(tmp_path / "run")
    plan_faults(run.directory, ("stopped", 1, 14))
    output = run.directory.with_suffix(".output")
    killed = []

    def kill_a_node() -> None:
        support.wait_until(lambda: (run.directory.with_suffix(".faults") / "taken0").exists(), seconds=300)
        placed = next(line for line in output.read_text().splitlines() if "Ray placed" in line)
        killed.append(placed.rstrip(".").rpartition(" ")[2])
        cluster.remove(killed[0])
        cluster.add()

    killing = threading.Thread(target=kill_a_node)
    killing.start()
    options = ("--launcher=ray", "--placement=strict_spread", "--max_restarts=3")
    done = train(run.directory, "multi_worker", options=options, variables=cluster.variables | TOKEN)
    killing.join()
    assert done.status == 0, done.output
    assert killed and done.said("worker 1 was lost: The actor "), done.output  # died, or is unavailable: as Ray saw it
    assert differences(run, undisturbed(2)) == []


@pytest.mark.parametrize("mode", [{"RAY_AUTH_TOKEN": secrets.token_hex(32)}, {"RAY_AUTH_MODE": "disabled"}])
def test_nobody_without_the_token_gets_anywhere(cluster: RayCluster, mode: dict[str, str]) -> None:
    asked = ["-m", "tfdist.launch", "--launcher=ray", "--workers=1", "--module=this", "--", "x"]
    kept_out = support.run_python(asked, env=cluster.variables | TOKEN | mode, timeout=300)
    assert kept_out.status == 2, kept_out.outputs()
    assert "cannot join a Ray cluster" in kept_out.stderr and "Zen" not in kept_out.stdout
    assert "Traceback" not in kept_out.stderr


def test_another_server_at_rays_address_is_one_message() -> None:
    asked = ["-m", "tfdist.launch", "--launcher=ray", "--workers=1", "--module=this", "--", "x"]
    with socket.create_server(("127.0.0.1", 0)) as server:  # which takes calls and says nothing
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = support.run_python(asked, env={"RAY_ADDRESS": address}, timeout=300)
    assert done.status == 2 and f"(RAY_ADDRESS is {address}): no Ray answers there." in done.stderr, done.outputs()
