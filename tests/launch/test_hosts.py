"""Hosts with addresses of their own, each with a supervisor of its own; one is cut off from the other for a while."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent import futures

import pytest
import support
from crashes.runs import EXPERIMENT, Process, Run, differences, environment
from processes import Running

pytestmark = pytest.mark.slow

STEP_SECONDS = 0.1


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:8]
        self.names = [f"tfdist-{name}-{index}" for index in range(2)]
        self.links = [f"t{name}{index}" for index in range(2)]
        self.addresses = [f"10.77.0.{index + 1}" for index in range(2)]

    def __enter__(self) -> Hosts:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def plug(self, state: str) -> None:
        """Pulls the second host's cable ("down") or puts it back ("up")."""
        ip("-n", self.names[1], "link", "set", self.links[1], state)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    made = Hosts()
    try:
        made.__enter__()
    except PermissionError as error:
        made.__exit__()
        pytest.skip(f"may not make network namespaces: {error}")
    yield made
    made.__exit__()


def test_a_host_that_was_cut_off_is_waited_for_and_the_run_goes_on(tmp_path: pathlib.Path, hosts: Hosts) -> None:
    run, reference = Run(tmp_path / "run"), Run(tmp_path / "reference")
    addresses = [f"{address}:2222" for address in hosts.addresses]
    direct = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    train = [f"--gin_file={EXPERIMENT}", "--gin_file=configs/strategies/multi_worker.gin", f"--run_dir={run.directory}"]
    with contextlib.ExitStack() as stack:

        def start(index: int, name: str) -> Running:
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            launch = [sys.executable, "-m", "tfdist.launch", "--launcher=host", "--max_restarts=5", "--", *train]
            variables = environment(f"{STEP_SECONDS}:{run.directory}") | direct | {"TF_CONFIG": json.dumps(config)}
            command = ["ip", "netns", "exec", name, *launch]
            return stack.enter_context(Running(command, tmp_path / f"output{index}", variables, support.REPOSITORY))

        launchers = list(map(start, range(2), hosts.names))
        launchers[0].until(lambda: run.newest_step >= 5)
        hosts.plug("down")
        for launcher in launchers:
            for words in ("lost the connection", "(restart 1)"):
                launcher.until(lambda each=launcher, words=words: words in each.output)
        launchers[0].until(lambda: "waiting for worker 1 at 10.77.0.2:2222" in launchers[0].output)
        hosts.plug("up")
        assert [launcher.end() for launcher in launchers] == [0, 0]
    with Process(reference, "mirrored") as process:
        assert process.wait() == 0, process.output
    assert differences(run, reference) == []
    assert len(run.events("resumed")) == len(run.events("restarted")) == 1
    theirs = (run.directory / "events-worker-1.jsonl").read_text()
    assert '"event": "worker_failed", "worker": 1' in theirs and '"event": "restarted"' in theirs


@pytest.mark.parametrize("launcher", ["tf_config", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_the_same_line_on_each_host_makes_one_cluster(
    launcher: str, hosts: Hosts, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    for name, address in zip(hosts.names, hosts.addresses, strict=True):
        own = pathlib.Path("/etc/netns", name, "hosts")  # which `ip netns exec` puts in the place of /etc/hosts
        request.addfinalizer(lambda own=own: shutil.rmtree(own.parent))  # type: ignore[misc]
        own.parent.mkdir(parents=True)
        own.write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
    launch = ["-m", "tfdist", "launch", f"--hosts={','.join(hosts.addresses)}", f"--launcher={launcher}"]
    line = [*launch, "train", "tfdist:experiments/digits.gin", "train.epochs=1", "--run_dir=run"]

    def start(name: str) -> support.Finished:
        return support.run_command(["ip", "netns", "exec", name, sys.executable, *line], cwd=tmp_path)

    with futures.ThreadPoolExecutor() as threads:
        for done in threads.map(start, reversed(hosts.names)):
            done.check()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["num_workers"] == 2
