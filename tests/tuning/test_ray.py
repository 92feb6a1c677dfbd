"""Sweeps over a real Ray cluster of three nodes: as on one machine, whatever of it is killed."""

from __future__ import annotations

import csv
import json
import pathlib
import signal
from collections.abc import Iterator

import pytest
import ray_cluster
import support
from mistakes import each_is_refused
from processes import Running, running
from ray_cluster import HEAD, RayCluster
from tuning.sweeps import Sweep, arguments, finish, held, write_experiment

from tfdist.tuning.execution import executor
from tfdist.tuning.execution.local_slots import read_log

pytestmark = pytest.mark.slow

ON_RAY = ("from tfdist.tuning.execution import executor", "tune.executor = @executor.Ray()")
EPOCHS = 20
LONG = (f"train.epochs = {EPOCHS}", "train.steps_per_call = 1", "train.callbacks = [@tiny.Held()]")
SAVING = ("from tfdist.checkpoint import policy", "train.checkpoint = @policy.CheckpointPolicy(every_epochs=1)")
HYPERBAND = ("tune.search = @search.Hyperband(factor=2)", "train.epochs = 2")
TWO_WORKERS = (
    "from tfdist.strategies import multi_worker",
    "train.strategy = @multi_worker.MultiWorker()",
    "tune.workers_per_trial = 2",
    "tune.max_trials = 1",
    "train.epochs = 2",
    "tune.executor = @executor.Ray(placement='strict_spread')",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster.running(3) as cluster:
        yield cluster


def training_pid(chief: Running, sweep: Sweep, trial: str) -> int:
    """Of a trial that has saved some epochs; `held` keeps it from ending."""
    chief.until(lambda: len(sweep.of("trial_reported", trial=trial)) > 3)
    return chief.until(lambda: sweep.pid(trial))


def node_of(sweep: Sweep, trial: str) -> str | None:
    """The address at which Ray has put a trial, once it has."""
    return read_log(str(sweep.directory / "trials" / trial / "output.log"), 0)[1]


def test_a_sweep_is_the_one_of_one_machine(tmp_path: pathlib.Path, gin_file: pathlib.Path, cluster: RayCluster) -> None:
    local, on_ray = Sweep(tmp_path / "local"), Sweep(tmp_path / "ray")
    finish(arguments(gin_file, local.directory, *HYPERBAND), tmp_path / "local.log")
    command = arguments(gin_file, on_ray.directory, *ON_RAY, *HYPERBAND)
    finish(command, tmp_path / "ray.log", cluster.variables)
    assert on_ray.outcomes == local.outcomes and {rung for _, rung in local.outcomes} == {0, 1}
    assert on_ray.result["best"] == local.result["best"]
    assert {e["host"].rpartition(".")[0] for e in on_ray.ends} == {"127.0.0"}
    trials = list(csv.DictReader((on_ray.directory / "trials.csv").read_text().splitlines()))
    assert all(trial["node"].startswith("127.0.0.") for trial in trials)
    assert '<td data-name="node"' in (on_ray.directory / "report/index.html").read_text()


def test_a_killed_node_loses_no_trial(tmp_path: pathlib.Path, gin_file: pathlib.Path, cluster: RayCluster) -> None:
    sweep = Sweep(tmp_path / "sweep")
    budget = ("tune.num_workers = 3", "tune.max_trials = 3")
    command = arguments(gin_file, sweep.directory, *ON_RAY, *LONG, *SAVING, *budget)
    with running(command, tmp_path / "log", cluster.variables) as chief:
        with held(gin_file):
            chief.until(lambda: len({node_of(sweep, f"{n:04d}") for n in range(3)} - {None}) == 3)
            victim = next(f"{n:04d}" for n in range(3) if node_of(sweep, f"{n:04d}") != HEAD)
            pid, node = training_pid(chief, sweep, victim), node_of(sweep, victim)
            cluster.remove(node)
            support.wait_until(lambda: support.is_gone(pid), seconds=60)
        cluster.add()
        assert chief.end() == 0, chief.output
    (lost,) = sweep.of("trial_ended", trial=victim, status="interrupted")
    assert lost["host"] == node and "worker 0 was lost: " in lost["message"], lost
    assert sorted((e["trial"], e["status"]) for e in sweep.ends) == [(f"{n:04d}", "done") for n in range(3)]
    assert [e["epoch"] for e in sweep.of("trial_reported", trial=victim)] == [*range(1, EPOCHS + 1)]
    result = json.loads((sweep.directory / "trials" / victim / "result.json").read_text())
    assert result["resumed_from_step"] > 0


def test_a_killed_driver_takes_its_trials_along_and_resumes(
    tmp_path: pathlib.Path, gin_file: pathlib.Path, cluster: RayCluster
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    budget = ("tune.num_workers = 2", "tune.max_trials = 2")
    command = arguments(gin_file, sweep.directory, *ON_RAY, *LONG, *SAVING, *budget)
    with held(gin_file):
        with running(command, tmp_path / "log", cluster.variables) as chief:
            pids = [training_pid(chief, sweep, trial) for trial in ("0000", "0001")]
            chief.signal(signal.SIGKILL)
            chief.end()
        support.wait_until(lambda: all(map(support.is_gone, pids)), seconds=60)
    finish(command, tmp_path / "log", cluster.variables)
    assert sorted((e["trial"], e["status"]) for e in sweep.ends) == [(f"{n:04d}", "done") for n in range(2)]
    for trial in ("0000", "0001"):
        assert [e["epoch"] for e in sweep.of("trial_reported", trial=trial)] == [*range(1, EPOCHS + 1)]
        result = json.loads((sweep.directory / "trials" / trial / "result.json").read_text())
        assert result["resumed_from_step"] > 0


def test_sigterm_lets_the_trials_on_all_nodes_save(
    tmp_path: pathlib.Path, gin_file: pathlib.Path, cluster: RayCluster
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    budget = ("tune.num_workers = 2", "tune.max_trials = 2")
    saving = ("from tfdist.checkpoint import policy", "train.checkpoint = @policy.CheckpointPolicy()")
    longer = "train.epochs = 2000"  # than the signal takes to reach them
    command = arguments(gin_file, sweep.directory, *ON_RAY, *LONG, longer, *saving, *budget)
    with running(command, tmp_path / "log", cluster.variables) as chief:
        with held(gin_file):
            for trial in ("0000", "0001"):
                training_pid(chief, sweep, trial)
            chief.signal(signal.SIGTERM)
        assert chief.end() == 143, chief.output
    assert len(sweep.of("trial_ended", status="interrupted")) == 2
    assert all(list((sweep.directory / "trials" / trial / "checkpoints").iterdir()) for trial in ("0000", "0001"))


def test_a_killed_head_ends_the_sweep_and_another_cluster_resumes_it(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    command = arguments(gin_file, sweep.directory, *ON_RAY, *LONG, *SAVING, "tune.max_trials = 1")
    (port,) = support.free_ports(1)
    with (
        held(gin_file),
        ray_cluster.running(1, port=port) as first,
        running(command, tmp_path / "log", first.variables) as chief,
    ):
        pid = training_pid(chief, sweep, "0000")
        first.kill()
        assert chief.end() != 0
        support.wait_until(lambda: support.is_gone(pid), seconds=60)
    with (
        ray_cluster.running(1, port=port) as second,
        running(command, tmp_path / "log", second.variables) as chief,
    ):
        assert chief.end() == 0, chief.output
    assert sorted((e["trial"], e["status"]) for e in sweep.ends) == [("0000", "done")]
    assert [e["epoch"] for e in sweep.of("trial_reported", trial="0000")] == [*range(1, EPOCHS + 1)]


def test_a_trial_of_two_workers_has_a_node_for_each(
    tmp_path: pathlib.Path, gin_file: pathlib.Path, cluster: RayCluster
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    command = arguments(gin_file, sweep.directory, *ON_RAY, *TWO_WORKERS)
    finish(command, tmp_path / "log", cluster.variables)
    result = json.loads((sweep.directory / "trials/0000/result.json").read_text())
    assert result["strategy"] == "multi_worker" and result["num_workers"] == 2 and sweep.result["best"] == "0000"
    (placed,) = [
        line
        for line in (sweep.directory / "trials/0000/output.log").read_text().splitlines()
        if line.startswith("[launch] Ray placed")
    ]
    assert len(set(placed.split()[6::4])) == 2, placed


def test_the_users_own_modules_reach_the_nodes(tmp_path: pathlib.Path) -> None:
    """On one node: those of one machine share the copy, and each that Ray prepares for the sweep makes it anew."""
    experiment, seen = tmp_path / "experiment", tmp_path / "seen"
    experiment.mkdir()
    seen.mkdir()
    write_experiment(experiment)
    module = experiment / "tiny.py"
    module.write_text(f"{module.read_text()}\n(pathlib.Path({str(seen)!r}) / FILE.parent.name).touch()\n")
    sweep = Sweep(tmp_path / "sweep")
    shipped = "tune.executor = @executor.Ray(working_dir='.')"
    command = arguments(pathlib.Path("tiny.gin"), sweep.directory, *ON_RAY, "tune.max_trials = 1", shipped)
    with (
        ray_cluster.running(1) as cluster,
        running(command, tmp_path / "log", cluster.variables, directory=experiment) as chief,
    ):
        assert chief.end() == 0, chief.output
    assert sweep.result["best"] == "0000"
    assert len(list(seen.glob("_ray_pkg_*"))) == 1  # the copy that Ray made was imported from


def test_a_sweep_waits_for_room_and_says_so(
    tmp_path: pathlib.Path, gin_file: pathlib.Path, cluster: RayCluster
) -> None:
    wanted = "tune.executor = @executor.Ray(cpus=64, memory_gb=1.5)"
    command = arguments(gin_file, tmp_path / "sweep", *ON_RAY, "tune.max_trials = 1", wanted)
    with running(command, tmp_path / "log", cluster.variables) as chief:
        log = tmp_path / "sweep" / "trials" / "0000" / "output.log"
        chief.until(lambda: log.exists() and "Waiting for Ray to place" in log.read_text())
        chief.signal(signal.SIGTERM)
        assert chief.end() == 143, chief.output
        assert "to place 1 × 64 CPU, 1.5 GiB memory. `ray status` lists" in log.read_text()


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.9:1", "cannot join a Ray cluster"), ("ray://127.0.0.9:1", "RAY_ADDRESS is ray://127.0.0.9:1")],
)
def test_no_cluster_is_one_message(tmp_path: pathlib.Path, gin_file: pathlib.Path, address: str, message: str) -> None:
    command = arguments(gin_file, tmp_path / "sweep", *ON_RAY, "tune.max_trials = 1")
    with running(command, tmp_path / "log", ray_cluster.SETTINGS | {"RAY_ADDRESS": address}) as chief:
        assert chief.end() == 2, chief.output
        assert message in chief.output and "Traceback" not in chief.output


test_what_cannot_be_asked_of_ray_is_one_message = each_is_refused(
    lambda wrong: executor.Ray(**wrong),
    ({"cpus": -1}, "cpus must be a number of at least 0; received -1"),
    ({"gpus": 1.5}, "gpus above 1 must be a whole number"),
    ({"placement": "near"}, "placement must be one of pack, spread"),
    ({"working_dir": "/nowhere"}, "must be a directory; received '/nowhere'"),
)
