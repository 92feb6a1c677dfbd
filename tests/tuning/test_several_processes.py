"""Trials of several processes on one machine."""

from __future__ import annotations

import json
import os
import pathlib
import signal

import pytest
import support
from crashes.pace import PACE, newest_step
from processes import running
from tuning.sweeps import Sweep, arguments, finish

pytestmark = pytest.mark.slow

SEVERAL = (
    "from tfdist.strategies import multi_worker",
    "train.strategy = @multi_worker.MultiWorker()",
    "tune.workers_per_trial = 2",
)


def test_a_trial_of_several_processes_pauses_survives_and_may_be_infeasible(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    sweep = Sweep(tmp_path / "sweep")
    rates = "{'keras.optimizers.SGD.learning_rate': @space.choice(values=[0.1, 1e30, 0.2])}"
    search = (
        "tune.search = @search.Hyperband(factor=2)",
        f"tune.space = {rates}",
        "train.epochs = 2",
        "tiny.linear.units = 8",
    )
    command = arguments(gin_file, sweep.directory, *SEVERAL, *search)
    with running(command, tmp_path / "log") as chief:
        chief.until(lambda: sweep.pid("0000"))
        os.kill(sweep.pid("0000"), signal.SIGKILL)
        assert chief.end() == 0, chief.output
    assert sweep.of("trial_ended", trial="0000", status="interrupted")[0]["message"].endswith("status 137 (SIGKILL)")
    by_rate = {json.dumps(values): status for values, status, *_ in sweep.outcomes.values()}
    assert sorted(by_rate.values()) == ["done", "infeasible", "paused"], chief.output
    (infeasible,) = [e for e in sweep.ends if e["status"] == "infeasible"]
    assert "Training diverged" in infeasible["message"] and "[worker" not in infeasible["message"]
    result = json.loads((sweep.directory / "trials" / sweep.result["best"] / "result.json").read_text())
    assert result["num_workers"] == 2 and result["resumed_from_step"] > 0


@pytest.mark.horovod
def test_a_trial_may_run_under_horovod(tmp_path: pathlib.Path, gin_file: pathlib.Path) -> None:
    strategy = ("from tfdist.strategies import horovod", "train.strategy = @horovod.Horovod()")
    budget = ("tune.workers_per_trial = 2", "tune.max_trials = 1", "train.epochs = 1")
    sweep = Sweep(tmp_path / "sweep")
    finish(arguments(gin_file, sweep.directory, *strategy, *budget), tmp_path / "log")
    result = json.loads((sweep.directory / "trials/0000/result.json").read_text())
    assert result["strategy"] == "horovod" and result["num_workers"] == 2 and sweep.result["best"] == "0000"


def test_a_trial_goes_on_after_xla_was_tried_in_it(tmp_path: pathlib.Path, gin_file: pathlib.Path) -> None:
    settings = (
        "from tfdist.checkpoint import policy",
        "from crashes import experiment",
        "from crashes import trials",
        "train.model = @trials.build_model",
        "trials.build_model.shape = (64,)",
        "train.deterministic = False",
        "train.callbacks = [@experiment.Paced()]",
        "train.checkpoint = @policy.CheckpointPolicy(every_steps=1)",
        "tune.max_trials = 1",
    )
    sweep = Sweep(tmp_path / "sweep")
    trial = sweep.directory / "trials" / "0000"
    command = arguments(gin_file, sweep.directory, *SEVERAL, *settings)
    variables = support.TESTS_PATH | {PACE: f"0.05:{trial}"}

    def is_tried() -> bool:
        return (trial / "tuned.json").exists() and newest_step(trial / "checkpoints") > 0

    with running(command, tmp_path / "log", variables) as chief:
        chief.until(is_tried)  # before the first epoch's end
        chief.signal(signal.SIGTERM)
        assert chief.end() == 143, chief.output
    left = newest_step(trial / "checkpoints")
    with running(command, tmp_path / "log", variables) as chief:
        chief.until(lambda: newest_step(trial / "checkpoints") > left)
        os.kill(sweep.pid("0000"), signal.SIGKILL)
        assert chief.end() == 0, chief.output
    first, second = [event["step"] for event in sweep.told("0000") if event["event"] == "resumed"]
    assert 0 < left == first < second, chief.output
    assert [event["status"] for event in sweep.of("trial_ended")] == ["interrupted", "interrupted", "done"]
    result = json.loads((trial / "result.json").read_text())
    assert result["num_workers"] == 2 and result["steps"] == 60
