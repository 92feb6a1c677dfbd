"""Sweeps over a cluster, with real processes on loopback: a chief and its workers over gRPC, killed and restarted."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import support
from tuning.sweeps import Running, Sweep, arguments, running

SLOW = ("train.epochs = 60", "train.steps_per_call = 1")
SAVING = ("from tfdist.checkpoint import policy", "train.checkpoint = @policy.CheckpointPolicy(every_epochs=1)")
SEVERAL = (
    "from tfdist.strategies import multi_worker",
    "train.strategy = @multi_worker.MultiWorker()",
    "tune.workers_per_trial = 2",
)


class Cluster:
    """A chief and workers of one sweep, each a process of its own; nothing of them is left afterwards."""

    def __init__(self, directory: pathlib.Path, gin_file: pathlib.Path, lease_seconds: int, *parameters: str) -> None:
        self.sweep = Sweep(directory / "sweep")
        self.port = support.free_ports(1)[0]
        lease = f"tune.lease_seconds = {lease_seconds}"
        self._command = arguments(gin_file, self.sweep.directory, lease, *parameters)
        self._directory = directory
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def start(
        self,
        name: str,
        *parameters: str,
        run_dir: pathlib.Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Running:
        variables = variables or {"KERASTUNER_TUNER_ID": name, "KERASTUNER_ORACLE_PORT": str(self.port)}
        command = [*self._command, *(f"--gin_param={each}" for each in parameters)]
        if run_dir is not None:
            command.append(f"--run_dir={run_dir}")
        return self._stack.enter_context(running(command, self._directory / f"{name}.log", variables))


@pytest.mark.slow
def test_a_killed_worker_loses_no_trial_and_the_sweep_ends_everywhere_at_once(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    with Cluster(tmp_path, gin_file, 30, "tune.max_trials = 4", *SLOW, *SAVING) as cluster:
        sweep = cluster.sweep
        workers = {name: cluster.start(name) for name in ("tuner0", "tuner1")}
        chief = cluster.start("chief")
        chief.until(lambda: len(sweep.of("trial_reported", trial="0001")) > 3)
        victim = sweep.of("trial_started", trial="0001")[0]["host"].split()[0]
        workers[victim].signal(signal.SIGKILL)
        workers[victim].wait_until_all_gone()  # its trial too
        (other,) = (name for name in workers if name != victim)
        assert workers[other].end() == 0 and "the sweep has ended" in workers[other].output
        left = datetime.datetime.now(datetime.UTC)
        assert chief.end() == 0, chief.output
    last = max(datetime.datetime.fromisoformat(e["time"]) for e in sweep.ends)
    assert (left - last).total_seconds() < 3.0  # with the end of its process, on a busy machine
    (lost,) = sweep.of("trial_ended", trial="0001", status="interrupted")
    assert "broke, and it did not come back" in lost["message"]
    assert [(e["trial"], e["status"]) for e in sorted(sweep.ends, key=lambda e: e["trial"])] == [
        (f"{number:04d}", "done") for number in range(4)
    ]
    assert [e["epoch"] for e in sweep.of("trial_reported", trial="0001")] == [*range(1, 61)]
    result = json.loads((sweep.directory / "trials/0001/result.json").read_text())
    assert result["resumed_from_step"] > 0
    assert [e["host"].split()[0] for e in sweep.of("trial_started", trial="0001")] == [victim, other]
    assert sweep.result["num_trials"] == 4


@pytest.mark.slow
def test_workers_find_a_restarted_chief_and_keep_what_they_train(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    with Cluster(tmp_path, gin_file, 60, "tune.max_trials = 4", *SLOW, *SAVING) as cluster:
        sweep = cluster.sweep
        chief = cluster.start("chief")
        workers = [cluster.start(name) for name in ("tuner0", "tuner1")]

        def pids() -> dict[str, int] | None:
            """Of the processes that train now, once there is a finished trial and two are running."""
            trials = {e["trial"] for e in sweep.of("trial_started")} - {e["trial"] for e in sweep.ends}
            found = {trial: sweep.pid(trial) for trial in trials}
            return found if sweep.ends and len(found) == 2 and all(found.values()) else None

        chief.until(pids)
        chief.signal(signal.SIGKILL)
        chief.end()
        chief.wait_until_all_gone()
        known = dict(sweep.outcomes)
        chief = cluster.start("chief")
        assert chief.end() == 0, chief.output
        assert [worker.end() for worker in workers] == [0, 0]
    assert known and {key: outcome for key, outcome in sweep.outcomes.items() if key in known} == known
    assert [(e["trial"], e["status"]) for e in sorted(sweep.ends, key=lambda e: e["trial"])] == [
        (f"{number:04d}", "done") for number in range(4)
    ]
    assert sum(worker.output.count(" begins: ") for worker in workers) == 4  # none began again


@pytest.mark.slow
def test_a_late_result_does_not_count(tmp_path: pathlib.Path, gin_file: pathlib.Path) -> None:
    with Cluster(tmp_path, gin_file, 3, "tune.max_trials = 6", *SLOW, *SAVING) as cluster:
        sweep = cluster.sweep
        chief = cluster.start("chief")
        workers = {name: cluster.start(name) for name in ("tuner0", "tuner1")}
        chief.until(lambda: sweep.of("trial_reported", trial="0000"))
        late = workers[sweep.of("trial_started", trial="0000")[0]["host"].split()[0]]
        late.signal(signal.SIGSTOP)  # but not its trial, which trains on
        chief.until(lambda: sweep.of("trial_ended", trial="0000", status="done"))
        late.signal(signal.SIGCONT)  # the other still has some to train
        assert chief.end() == 0, chief.output
        assert [worker.end() for worker in workers.values()] == [0, 0]
    assert "since its lease was lost" in late.output
    messages = [e["message"] for e in sweep.of("trial_ended", trial="0000", status="interrupted")]
    assert "was not heard from for 3 s" in messages[0]
    assert sorted((e["trial"], e["status"]) for e in sweep.ends) == [(f"{number:04d}", "done") for number in range(6)]
    assert [e["epoch"] for e in sweep.of("trial_reported", trial="0000")] == [*range(1, 61)]


@pytest.mark.slow
def test_the_chief_of_tf_config_trains_too_and_who_cannot_take_part_is_told_why(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    addresses = [f"127.0.0.1:{port}" for port in support.free_ports(4)]

    def member(index: int, workers: Sequence[str] = addresses) -> dict[str, str]:
        return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}

    with Cluster(tmp_path, gin_file, 30, "tune.max_trials = 4", *SLOW) as cluster:
        sweep = cluster.sweep
        nobody = ["127.0.0.1:1", addresses[1]]
        alone = cluster.start("alone", "tune.peer_timeout_seconds = 2", variables=member(1, nobody))
        chief = cluster.start("chief", variables=member(0))
        elsewhere = cluster.start("elsewhere", run_dir=tmp_path / "elsewhere", variables=member(1))
        chief.until(lambda: "listens at" in chief.output)
        with socket.create_connection(("127.0.0.1", int(addresses[0].split(":")[1]))) as foreign:
            foreign.sendall(b"GET / HTTP/1.1\r\n\r\n")
        other = cluster.start("other", "train.global_batch_size = 32", variables=member(2))
        assert alone.end() == 4 and "could not reach the sweep's chief at 127.0.0.1:1" in alone.output, alone.output
        assert other.end() == 2 and "the configuration: its settings differ" in other.output, other.output
        assert elsewhere.end() == 2 and "all machines of a sweep share one" in elsewhere.output, elsewhere.output
        assert all("Traceback" not in each.output for each in (alone, other, elsewhere))
        assert chief.end() == 0
    assert len(sweep.ends) == 4 and {e["worker"] for e in sweep.of("trial_started")} == {0}


@pytest.mark.slow
def test_a_trial_of_several_processes_pauses_survives_and_may_be_infeasible(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    rates = "{'keras.optimizers.SGD.learning_rate': @space.choice(values=[0.1, 1e30, 0.2])}"
    search = (
        "tune.search = @search.Asha(factor=2)",
        f"tune.space = {rates}",
        "tune.max_trials = 3",
        "train.epochs = 2",
        "tiny.linear.units = 8",
    )
    command = arguments(gin_file, sweep.directory, *SEVERAL, *search)
    with running(command, tmp_path / "log") as chief:
        chief.until(lambda: sweep.pid("0000"))
        os.kill(sweep.pid("0000"), signal.SIGKILL)
        assert chief.end() == 0, chief.output
    assert sweep.of("trial_ended", trial="0000", status="interrupted")[0]["message"].endswith("status 137")
    by_rate = {json.dumps(values): status for values, status, *_ in sweep.outcomes.values()}
    assert sorted(by_rate.values()) == ["done", "infeasible", "paused"], chief.output
    (infeasible,) = [e for e in sweep.ends if e["status"] == "infeasible"]
    assert "Training diverged" in infeasible["message"] and "[worker" not in infeasible["message"]
    result = json.loads((sweep.directory / "trials" / sweep.result["best"] / "result.json").read_text())
    assert result["num_workers"] == 2 and result["resumed_from_step"] > 0


@pytest.mark.slow
@pytest.mark.horovod
def test_a_trial_may_run_under_horovod(tmp_path: pathlib.Path, gin_file: pathlib.Path) -> None:
    strategy = ("from tfdist.strategies import horovod", "train.strategy = @horovod.Horovod()")
    budget = ("tune.workers_per_trial = 2", "tune.max_trials = 1", "train.epochs = 1")
    sweep = Sweep(tmp_path / "sweep")
    with running(arguments(gin_file, sweep.directory, *strategy, *budget), tmp_path / "log") as chief:
        assert chief.end() == 0, chief.output
    result = json.loads((sweep.directory / "trials/0000/result.json").read_text())
    assert result["strategy"] == "horovod" and result["num_workers"] == 2 and sweep.result["best"] == "0000"
