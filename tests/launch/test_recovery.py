"""Runs whose workers are lost in every way: noticed, named, started again, and as good as undisturbed at the end."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import support
from crashes.runs import Run, differences, environment
from equivalence.runs import assert_close
from processes import running

pytestmark = pytest.mark.slow

EXPERIMENT = "tests/launch/faulty.gin"
TIMEOUT_SECONDS = 900.0
LAUNCHERS = {"multi_worker": "tf_config", "horovod": "horovod"}
NO_DROPOUT = "experiment.build_model.dropout = 0.0"
both_strategies = pytest.mark.parametrize(
    "strategy", ["multi_worker", pytest.param("horovod", marks=pytest.mark.horovod)]
)


@dataclasses.dataclass(frozen=True)
class Launched:
    """What a launcher came to."""

    status: int
    output: str

    def said(self, words: str) -> list[str]:
        """The launcher's own lines that hold some words."""
        return [line for line in self.output.splitlines() if line.startswith("[launch] ") and words in line]


def train(
    run_dir: pathlib.Path,
    strategy: str,
    *params: str,
    options: tuple[str, ...] = (),
    workers: int = 2,
    variables: Mapping[str, str] = {},
) -> Launched:
    """Trains to the end, or until it ends otherwise; faults are those of `plan_faults`."""
    files = [EXPERIMENT, f"configs/strategies/{strategy}.gin"]
    given = [f"--gin_file={name}" for name in files] + [f"--gin_param={param}" for param in params]
    module = "tfdist.main"
    if strategy in LAUNCHERS:
        launch = [f"--workers={workers}", f"--launcher={LAUNCHERS[strategy]}", "--backoff_seconds=0.1", *options]
        module, given = "tfdist.launch", [*launch, "--", *given]
    faults = {"TFDIST_TEST_FAULTS": str(faults_of(run_dir))} if faults_of(run_dir).exists() else {}
    variables = environment() | faults | dict(variables)
    log = run_dir.with_suffix(".output")
    log.unlink(missing_ok=True)
    with running([*given, f"--run_dir={run_dir}"], log, variables, support.REPOSITORY, module) as launched:
        return Launched(launched.end(timeout=TIMEOUT_SECONDS), launched.output)


def faults_of(run_dir: pathlib.Path) -> pathlib.Path:
    return run_dir.with_suffix(".faults")


def plan_faults(run_dir: pathlib.Path, *faults: tuple[str, int, int]) -> None:
    """Each a kind, a place, and the step, or the number of the start, of tests/launch/faulty.py."""
    faults_of(run_dir).mkdir()
    (faults_of(run_dir) / "faults.json").write_text(json.dumps(faults))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A run of so many replicas in which nobody fails."""
    root, made = tmp_path_factory.mktemp("undisturbed"), {}

    def run(replicas: int, *params: str) -> Run:
        if (replicas, params) not in made:
            found = Run(root / f"run{len(made)}")
            done = train(found.directory, "mirrored", f"mirrored.Mirrored.num_cpu_devices = {replicas}", *params)
            assert done.status == 0, done.output
            made[replicas, params] = found
        return made[replicas, params]

    return run


def details(run: Run, name: str) -> list[dict[str, Any]]:
    return [event["details"] for event in run.events(name)]


@both_strategies
def test_workers_that_are_lost_in_every_way_cost_no_more_than_time(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Run], strategy: str
) -> None:
    run = Run(tmp_path / "run")
    is_horovod = strategy == "horovod"
    faults = [
        ("terminated", 1, 3),  # start 1
        ("killed", 1, 8),  # start 2, which is the second command's first
        ("stopped", 0, 14),
        # What hangs is noticed by the same code under both, and horovodrun listens before it starts anybody.
        *([] if is_horovod else [("never_starts", 1, 4), ("port_taken", 1, 5)]),
        ("raises", 1, 20),
        *([] if is_horovod else [("blocked", 1, 27), ("input_stuck", 0, 34)]),
    ]
    plan_faults(run.directory, *faults)
    timeout = f"{strategy}.{'Horovod' if is_horovod else 'MultiWorker'}.peer_timeout_seconds = 10.0"
    options = ("--max_restarts=10", "--deadline_seconds=5")

    left = train(run.directory, strategy, timeout, options=options)
    assert left.status == 143, left.output
    assert not run.is_finished and not left.said("Starting again")  # a preemption is no failure

    done = train(run.directory, strategy, timeout, options=options)
    assert done.status == 0, done.output
    assert differences(run, undisturbed(2)) == []

    failed, hung = details(run, "worker_failed"), details(run, "worker_hung")
    taken = [] if is_horovod else [(1, 2)]
    assert [(event["place"], event["status"]) for event in failed] == [(1, 137), *taken, (1, 1)]
    assert [event["place"] for event in hung] == [0, *([] if is_horovod else [1, 1, 0])], done.output
    restarts = details(run, "restarted")
    assert [event["restart"] for event in restarts] == list(range(1, len(failed) + len(hung) + 1))
    assert len(details(run, "restart_backoff")) == len(restarts)
    assert details(run, "restart_backoff")[0]["seconds"] == 0.0

    killed = f"worker 1 (host {failed[0]['host']}, process {failed[0]['pid']})"
    assert any(killed in line for line in done.said("ended with status 137"))
    assert done.said("worker 0 (host") and done.said("hangs: it is stopped, as by SIGSTOP")
    assert done.said("its stacks cannot be shown: it is stopped")
    if is_horovod:
        return
    assert done.said("worker 1") and done.said("the others waited for it, and it did not come")
    assert "waiting for worker 1" in done.output and "waited 10 s and gives up" in done.output
    assert done.said("faulty.py")  # in the stacks of who is blocked
    assert done.said("its input pipeline is stuck in Python code")
    stored = [path.read_text() for path in sorted((run.directory / "telemetry").glob("stacks-worker-*.txt"))]
    assert len(stored) > 3 and "tfdist/training/loop/loop.py" in stored[-1]  # of who waits
    assert [bool(event["step"]) for event in run.events("worker_hung")][:2] == [True, False]  # one came to no step


def test_without_a_flag_a_run_whose_worker_is_killed_twice_ends_well_and_says_so(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Run]
) -> None:
    run = Run(tmp_path / "run")
    plan_faults(run.directory, ("killed", 1, 8), ("killed", 1, 14))
    done = train(run.directory, "multi_worker")
    assert done.status == 0, done.output
    assert differences(run, undisturbed(2)) == []
    assert len(details(run, "restarted")) == 2 and len(done.said("Starting again")) == 2
    notes = json.loads((run.directory / "result.json").read_text())["notes"]
    assert notes[-1] == "The result was reached with 2 restarts after workers failed."


def test_two_of_three_workers_go_on_and_the_third_is_taken_in_again(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Run]
) -> None:
    run = Run(tmp_path / "run")
    plain = "train.model = @faulty.build_plain_model"
    plan_faults(run.directory, ("killed", 2, 8), ("dies_at_once", 2, 2), ("dies_at_once", 2, 3), ("killed", 0, 24))
    done = train(run.directory, "multi_worker", plain, options=("--max_restarts=9", "--min_workers=2"), workers=3)
    assert done.status == 0, done.output
    assert [event["places"] for event in details(run, "restarted")] == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2]]
    assert [event["num_workers"] for event in details(run, "training_started")] == [3, 2, 3]
    assert [event["num_microbatches"] for event in details(run, "fewer_workers")] == [2]
    assert done.said("(restart 3) without slot 2.")
    ours, theirs = run.weights(), undisturbed(3, plain).weights()
    assert ours.keys() == theirs.keys()
    assert_close(ours.values(), [theirs[name] for name in ours], tolerance=1e-5)
