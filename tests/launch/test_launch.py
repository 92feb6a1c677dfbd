"""The launcher with small programs in place of tfdist.main, as real processes."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from launch.programs import DEADLINE_SECONDS, SHOWING, Run, assert_gone, both_launchers

from tfdist.errors import EXIT_PREEMPTED, UserError
from tfdist.launch import processes, worker_host
from tfdist.launch.horovod_workers import serve_rendezvous
from tfdist.launch.supervise.output import STDOUT, Output
from tfdist.launch.supervise.watch import Ending, find_root_cause
from tfdist.launch.worker_host import HostedWorker


def test_workers_get_a_place_in_a_cluster_an_address_of_their_own_and_their_cpus(
    launch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import socket
port = int(config["cluster"]["worker"][index].rpartition(":")[2])
for _ in range(2):
    server = socket.create_server(("", port))
    server.close()
with socket.socket() as other:
    try:
        other.bind(("127.0.0.1", port))
    except OSError:
        cpus = sorted(os.sched_getaffinity(0))
        print(json.dumps([config, sys.argv[1:], cpus, os.environ["no_proxy"]]))
"""
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.setenv("no_proxy", "example.com")
    status, stdout, _ = launch(program, "--a=b c", "--", "d", options=("--pin_cpus",)).finish()
    found = [json.loads(line.removeprefix(f"[worker {index}] ")) for index, line in enumerate(sorted(stdout))]
    configs, arguments, cpus, direct = zip(*found, strict=True)
    assert (status, len(found)) == (0, 2)
    assert [config["task"] for config in configs] == [{"type": "worker", "index": index} for index in range(2)]
    addresses = configs[0]["cluster"]["worker"]
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len(set(addresses)) == 2 and all(address.startswith("127.0.0.1:") for address in addresses)
    assert arguments == (["--a=b c", "--", "d"],) * 2
    assert all(cpus) and (not set(cpus[0]) & set(cpus[1]) or len(os.sched_getaffinity(0)) == 1)
    assert direct == ("example.com,127.0.0.1,localhost",) * 2


def test_each_line_is_whole_keeps_its_stream_and_order_and_bears_its_workers_name(launch: Callable[..., Run]) -> None:
    program = """
for i in range(300):
    os.write(1, f"out {i} ".encode() + "é".encode() * 500)
    os.write(1, b"b" * 700 + b"\\n")
    print(f"err {i}", file=sys.stderr)
sys.stdout.write("no newline at the end")
"""
    status, stdout, stderr = launch(program, workers=3).finish()
    assert status == 0 and len(stdout) == 903 and len(stderr) == 900
    for index in range(3):
        name = f"[worker {index}] "
        out = [f"{name}out {i} " + "é" * 500 + "b" * 700 for i in range(300)]
        assert [line for line in stdout if line.startswith(name)] == [*out, f"{name}no newline at the end"]
        assert [line for line in stderr if line.startswith(name)] == [f"{name}err {i}" for i in range(300)]


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_stop_the_workers(launch: Callable[..., Run]) -> None:
    program = """
for i in range(20000):
    print("line", i)
mark(f"done{index}")
"""
    run = launch(program, stdout=subprocess.PIPE)
    assert run.popen.stdout
    run.popen.stdout.readline()
    run.popen.stdout.close()
    assert run.end(timeout=DEADLINE_SECONDS) == 0
    assert all((run.directory / f"done{i}").exists() for i in (0, 1))


@pytest.mark.slow
@both_launchers
def test_the_first_failure_is_the_commands_and_ends_the_others_with_their_children_if_need_be_by_sigkill(
    launch: Callable[..., Run], launcher: str
) -> None:
    program = """
if index == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark("child", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid)
    time.sleep(100)
wait_for("child")
print("no such binding", file=sys.stderr)
sys.exit(2)
"""
    run = launch(program, options=(f"--launcher={launcher}",))
    status, _, stderr = run.finish()
    assert status == 2
    assert "[worker 1] no such binding" in stderr and any("Killing worker 0" in line for line in stderr)
    assert stderr[-1] == "[launch] worker 1 ended with status 2"
    assert_gone(run.read_pid("pid0"))
    assert_gone(run.read_pid("child"))


@pytest.mark.slow
def test_when_one_worker_is_preempted_the_others_save_too(launch: Callable[..., Run]) -> None:
    program = """
def save(*_):
    time.sleep(0.5)
    print("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
mark(f"ready{index}")
wait_for(f"ready{1 - index}")
if index == 1:
    sys.exit(143)
time.sleep(100)
"""
    status, stdout, _ = launch(program).finish()
    assert (status, stdout) == (EXIT_PREEMPTED, ["[worker 0] saved"])


@pytest.mark.slow
@both_launchers
def test_no_worker_outlives_a_launcher_that_is_killed(launch: Callable[..., Run], launcher: str) -> None:
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark(f"ready{index}")
time.sleep(100)
"""
    run = launch(program, options=(f"--launcher={launcher}",))
    run.wait_for("ready0", "ready1")
    run.signal(signal.SIGKILL)
    run.end()
    for name in ("pid0", "pid1"):
        assert_gone(run.read_pid(name), within_seconds=20.0 if launcher == "horovod" else 2.0)


def events(run: Run, name: str) -> list[dict]:
    lines = (run.directory / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


@pytest.mark.slow
def test_failures_restarts_waits_and_the_breaker_are_events(launch: Callable[..., Run]) -> None:
    program = """
run_dir.mkdir(exist_ok=True)
heartbeat.beat(heartbeat.TRAINING, 5)
if index == 1:
    wait_for(f"start0-{start}")
    print("no memory", file=sys.stderr)
    heartbeat.add_exit_info(error_id="device-memory")
    sys.exit(1)
time.sleep(100)
"""
    run = launch(SHOWING + program, options=("--max_restarts=9", "--backoff_seconds=0.05"))
    status, _, stderr = run.finish()
    assert status == 1
    assert any("4 failures in a row brought no new step (step 5 was the last)" in line for line in stderr)
    failed = events(run, "worker_failed")
    assert [(event["worker"], event["step"], event["details"]["status"]) for event in failed] == [(1, 5, 1)] * 5
    assert all(event["details"]["host"] and event["details"]["phase"] == "compute" for event in failed)
    assert {event["details"]["error_id"] for event in failed} == {"device-memory"}
    assert [event["details"]["seconds"] for event in events(run, "restart_backoff")] == [0.0, 0.05, 0.1, 3.0]
    assert [event["details"]["restart"] for event in events(run, "restarted")] == [1, 2, 3, 4]
    assert [event["level"] for event in events(run, "breaker_opened")] == ["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("left", "status"), [(False, 2), (True, 99)])
def test_wrong_input_and_a_start_that_left_are_not_started_again(
    launch: Callable[..., Run], left: bool, status: int
) -> None:
    program = SHOWING + f"heartbeat.add_exit_info(left_after_saving={left}); sys.exit({status})"
    run = launch(program, options=("--max_restarts=3", "--backoff_seconds=0.05"), workers=1)
    ended, _, stderr = run.finish()
    assert ended == status and not any("Starting again" in line for line in stderr)


@pytest.mark.slow
@pytest.mark.horovod
def test_horovods_others_go_on_without_a_worker_that_does_not_come_back(launch: Callable[..., Run]) -> None:
    program = """
run_dir.mkdir(exist_ok=True)
if slot == 1:
    sys.exit(9)
if "TFDIST_ALL_WORKERS" in os.environ:
    print("with", os.environ["TFDIST_ALL_WORKERS"], "as", slot, index)
    sys.exit(0)
time.sleep(100)
"""
    options = ("--launcher=horovod", "--max_restarts=9", "--min_workers=2", "--backoff_seconds=0.05")
    run = launch(SHOWING + program, options=options, workers=3)
    status, stdout, stderr = run.finish()
    assert status == 0, stderr
    assert sorted(stdout) == ["[worker 0] with 3 as 0 0", "[worker 1] with 3 as 2 1"]
    assert any("(restart 2) without slot 1." in line for line in stderr)
    assert [event["details"]["places"] for event in events(run, "restarted")] == [[0, 1, 2], [0, 2]]


@pytest.mark.slow
def test_a_worker_that_leaves_after_an_error_of_its_own_is_the_cause_though_others_lost_it_first(
    launch: Callable[..., Run],
) -> None:
    program = """
heartbeat.beat(heartbeat.TRAINING, 40)
if index == 0:
    wait_for("leaving1")
    print("lost the connection", file=sys.stderr)
    sys.exit(4)
heartbeat.beat(heartbeat.LEAVING)
mark("leaving1")
time.sleep(4)  # longer than a lost peer has the launcher wait for the cause
print("no such thing", file=sys.stderr)
sys.exit(1)
"""
    status, _, stderr = launch(SHOWING + program).finish()
    assert status == 1, stderr
    assert [line for line in stderr if line.startswith("[launch] ")] == ["[launch] worker 1 ended with status 1"]


@pytest.mark.slow
def test_a_killed_worker_costs_one_line_for_each_other_and_their_stacks_are_in_the_run_directory(
    launch: Callable[..., Run],
) -> None:
    program = """
run_dir.mkdir(exist_ok=True)
heartbeat.beat(heartbeat.TRAINING, 40)
mark(f"trains{index}")
if index == 3:
    for other in range(6):
        wait_for(f"trains{other}")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""
    run = launch(SHOWING + program, workers=6)
    status, _, stderr = run.finish()
    assert status == 137
    first, *others, where, last = [line.removeprefix("[launch] ") for line in stderr if line.startswith("[launch] ")]
    assert re.fullmatch(r"worker 3 \(.*\) ended with status 137 \(SIGKILL\); ending worker 0, .*, worker 5\.", first)
    assert others == [f"worker {other}: training, last step 40" for other in (0, 1, 2, 4, 5)]
    assert last == "worker 3 ended with status 137 (SIGKILL)"
    (stored,) = (run.directory / "run" / "telemetry").iterdir()
    assert where == f"The stacks of all running workers: {stored}"
    content = stored.read_text()
    assert content.count("program.py") == 5 and re.search(
        r"^worker 5 \(host .*\): training for .* s, last", content, re.MULTILINE
    )


@pytest.mark.slow
def test_without_restarts_a_hang_is_told_and_not_ended(launch: Callable[..., Run]) -> None:
    program = """
heartbeat.beat(heartbeat.BUILDING)
if index == 0:
    wait_for("told")
heartbeat.beat(heartbeat.TRAINING, 1)
wait_for("told")
heartbeat.beat(heartbeat.TRAINING, 2)
"""
    run = launch(SHOWING + program, options=("--start_deadline_seconds=1",))
    run.until(lambda: "main thread" in run.stderr)
    lines = run.stderr.splitlines()
    said = lines[: 1 + next(index for index, line in enumerate(lines) if "main thread" in line)]
    (run.directory / "told").touch()
    assert run.finish()[0] == 0
    assert re.search(r"worker 0 \(host .*, process \d+\) hangs: it has shown no progress for more than 1 s", said[0])
    assert said[-1].startswith("[launch]     main thread") and not any("worker 1" in line for line in said[1:])


@pytest.mark.horovod
def test_horovods_workers_listen_on_this_machine_and_are_not_given_up_when_silent(launch: Callable[..., Run]) -> None:
    program = """
names = ("GLOO_TIMEOUT_SECONDS", "GLOO_IFACE", "GLOO_RENDEZVOUS_ADDR", "RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE")
print(*(os.environ["HOROVOD_" + name] for name in names))
"""
    run = launch(program, options=("--launcher=horovod",))
    status, stdout, stderr = run.finish()
    assert status == 0, stderr
    assert sorted(line for line in stdout if "127.0.0.1" in line) == [
        f"[worker {rank}] 3600 lo 127.0.0.1 {rank} 2 {rank} 1" for rank in range(2)
    ]


def test_without_horovod_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.runner.gloo_run", None)
    with (
        pytest.raises(UserError, match=r"Run: python -m tfdist\.build_horovod"),
        serve_rendezvous("127.0.0.1", listens_on="127.0.0.1"),
    ):
        pass


@pytest.mark.slow
def test_blame_goes_to_the_first_by_its_own_doing() -> None:
    def blamed(*statuses: tuple[int, int, int, bool]) -> int | None:
        ending = find_root_cause([Ending(*each) for each in statuses])
        return ending.worker if ending else None

    assert blamed((0, 0, 1, False), (1, 0, 2, False)) is None
    assert blamed((0, 0, 1, False), (1, 137, 2, False), (2, 2, 3, False)) == 1
    assert blamed((0, 1, 5, False), (1, 2, 5, False)) == 1  # at the same time: the user's input
    assert blamed((0, 4, 1, False), (1, 2, 9, True)) == 1  # the cause of a lost peer comes later
    assert blamed((0, 134, 1, False), (1, 137, 2, False)) == 1  # TensorFlow aborts when a peer is gone
    assert blamed((0, 4, 1, False), (1, 143, 2, True), (2, 137, 3, True)) == 0  # ended by the launcher
    assert blamed((0, 4, 1, False), (1, 1, 2, True)) == 1  # no signal has a worker end with a traceback
    assert blamed((0, 137, 1, False), (1, 1, 2, True)) == 0
    assert blamed((0, 143, 1, False), (1, 4, 2, False)) == 0  # saved as asked; the other then lost it
    assert blamed((0, 143, 1, False), (1, 1, 2, False)) == 1  # a bug while saving


def test_threads_that_ask_at_once_see_one_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(processes, "send_to_group", lambda pid, number: (killed.append(pid), time.sleep(0.2)))
    process = processes.Process(0, ["true"], dict(os.environ))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: process.poll(), range(4))) == [0] * 4
    assert killed == [process.pid]
    for pipe in process.pipes:
        pipe.close()


def test_a_worker_that_is_given_up_while_its_host_shows_something_passes_that_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, is_given_up, failures = threading.Event(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", failures.append)

    class Host:
        inherited: ClassVar[Mapping[str, str]] = {}

        def call(self, method: str, *arguments: Any) -> Any:
            assert method == "look"
            looks.set()
            is_given_up.wait(DEADLINE_SECONDS)
            shown = {"written": [(STDOUT, "its last words\n")], "shown": {}, "now": time.monotonic()}
            return {"status": 0, "pid": 1, "state": "Z"} | shown

    with (tmp_path / "said").open("wb") as said:
        output = Output(said.fileno(), said.fileno())
        worker = HostedWorker(0, tmp_path, output)
        assert worker.begin(Host())
        worker.follow()
        looks.wait(DEADLINE_SECONDS)
        worker.fail("another one could not be started")
        is_given_up.set()
        worker.join()
        output.drain(DEADLINE_SECONDS)
    assert failures == [] and worker.poll() == 137
    assert "its last words" in (tmp_path / "said").read_text()


def test_a_host_says_that_the_kernel_killed_its_worker_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_host, "count_memory_kills", lambda: 0)
    monkeypatch.setattr(processes, "count_memory_kills", lambda: 1)
    host = worker_host.WorkerHost(None)
    host.start(0, ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], {})
    while (seen := host.look(1.0))["status"] is None:
        pass
    assert seen["status"] == 137 and processes.KILLED_FOR_MEMORY in "".join(text for _, text in seen["written"])
