"""Sweeps with real processes: every way to search, kills of the chief and of workers, and what cannot be trained."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import support
from gcs.server import GcsServer
from processes import running, serving
from tuning.sweeps import ACCURACY, Sweep, arguments, finish, held

from tfdist.storage import files
from tfdist.tuning.schedule.chief import MAX_INTERRUPTIONS

pytestmark = pytest.mark.slow

RATE, SIZE, CALLS = "keras.optimizers.SGD.learning_rate", "train.eval_batch_size", "train.steps_per_call"
SHOWN_ENDS = {"done": "STATUS_SUCCESS", "infeasible": "STATUS_FAILURE"}  # by TensorBoard
SEVERAL = """\
import json, sys
import tensorflow
from tfdist.main import main
for number, arguments in enumerate(json.loads(sys.argv[1])):
    print(f"status {main(arguments)}", flush=True)
"""
BAYESIAN = ("tune.search = @search.Bayesian(num_initial_points=3)", "tune.max_trials = 6")
# Without a pruner: a trial that is to be stopped may come to its end before it hears of it.
OPTUNA = ("tune.search = @search.Optuna(sampler_arguments={'n_startup_trials': 2})", "tune.max_trials = 6")
HAS_OPTUNA = importlib.util.find_spec("optuna") is not None
EPOCHS = 20
SLOW = (f"train.epochs = {EPOCHS}", "train.steps_per_call = 1")


class TensorBoard:
    """A server that runs, asked over HTTP for what it shows."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, plugin: str, request: dict[str, Any] | None = None) -> Any:
        """What `/data/plugin/…` answers, to a GET or, with a request, to a POST."""
        body = None if request is None else json.dumps(request).encode()
        headers = {"Content-Type": "application/json", "X-XSRF-Protected": "1"}
        asked = urllib.request.Request(f"{self._address}/data/plugin/{plugin}", body, headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.loads(answer.read())

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.ask("scalars/tags"))
        return False


@contextlib.contextmanager
def tensorboard(directory: pathlib.Path) -> Iterator[TensorBoard]:
    """A server of what a directory holds, once it has read that."""
    (port,) = support.free_ports(1)
    log = directory.parent / f"{directory.name}-tensorboard.log"
    command = ["-m", "tensorboard.main", f"--logdir={directory}", f"--port={port}", "--load_fast=false"]
    server = TensorBoard(f"http://127.0.0.1:{port}")
    with serving([sys.executable, *command], log, server.is_up):
        yield server


@dataclasses.dataclass(frozen=True)
class Done:
    """The sweeps that one process made, by name, and what it said of those that it did not."""

    directory: pathlib.Path
    errors: str

    def __getitem__(self, name: str) -> Sweep:
        return Sweep(self.directory / name)


def run_several(commands: list[list[str]], statuses: list[int], path: str | pathlib.Path = "") -> support.Finished:
    """Runs commands one after another in one process, which may import from `path`; they end with these statuses."""
    script = f"import sys\nsys.path.append({str(path)!r})\n{SEVERAL}"
    finished = support.run_python(["-c", script, json.dumps(commands)], timeout=500).check()
    lines = [line for line in finished.stdout.splitlines() if line.startswith("status")]
    assert lines == [f"status {status}" for status in statuses], finished.outputs()
    return finished


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, gin_file: pathlib.Path) -> Done:
    """Sweeps of each kind, one after the other in one process, which has computed with TensorFlow before."""
    directory = tmp_path_factory.mktemp("sweeps")
    grid = (
        f"'{RATE}': @space.choice(values=[0.1, 1e30]), '{SIZE}': @space.integer(low=100, high=101), "
        f"'{CALLS}': @space.choice(values=[None, 5])"
    )
    median = f"tune.space = {{'{RATE}': @space.choice(values=[0.5, 0.4, 0.3, 1e-5, 2e-5, 3e-5])}}"
    first = ("tune.max_trials = 1", "train.epochs = 1")
    starts = [
        (
            *("random", 0, "tune.max_trials = 3", "tune.num_workers = 2", "train.epochs = 1"),
            "train.callbacks = [@keras.callbacks.CSVLogger()]",
            "keras.callbacks.CSVLogger.filename = '%RUN_DIR/of-callback.csv'",
        ),
        (
            *("grid", 0, f"tune.space = {{{grid}}}", "tune.search = @search.Grid()"),
            *("tiny.linear.units = 8", "train.epochs = 1"),
        ),
        ("bayesian", 0, *BAYESIAN),
        *([("optuna", 0, *OPTUNA)] if HAS_OPTUNA else []),
        ("hyperband", 0, "tune.search = @search.Hyperband(factor=2)", "tune.num_workers = 2"),
        ("asha", 0, "tune.search = @search.AshaStopping(factor=2)", "tune.max_trials = 5", median, *SLOW),
        ("median", 0, "tune.search = @search.MedianStopping(min_trials=2)", "tune.max_trials = 6", median, *SLOW),
        (
            *("unfit", 0, "tune.search = @search.Grid()", "train.epochs = 1"),
            "tune.space = {'tiny.linear.units': @space.choice(values=[8, -1, -2, -3, -4, 16])}",
        ),
        ("hopeless", 0, *first, f"tune.space = {{'{RATE}': @space.choice(values=[1e30])}}", "tiny.linear.units = 8"),
        ("objective", 2, *first, "tune.objective = 'val_acuracy'", "tune.direction = 'max'"),
        ("nothing", 2, *first, "train.eval_data = None", "tune.objective = 'val_loss'"),
        ("model", 2, *first, "tune.space = {'tiny.linear.units': @space.choice(values=['wide'])}"),
        ("model", 0, *first),
    ]
    trained = arguments(gin_file, directory / "trained", "train.epochs = 1", mode="train")
    commands = [trained, *(arguments(gin_file, directory / name, *settings) for name, _, *settings in starts)]
    finished = run_several(commands, [0, *(status for _, status, *_ in starts)], path=gin_file.parent)
    return Done(directory, finished.stderr)


@pytest.mark.parametrize(
    ("name", "trials"),
    [("random", 3), ("grid", 8), ("bayesian", 6), ("hyperband", None), ("asha", 5), ("median", 6)],
)
def test_each_search_comes_to_its_end_and_names_its_best(done: Done, name: str, trials: int | None) -> None:
    sweep = done[name]
    first, last = sweep.events[0], sweep.events[-1]
    assert first["event"] == "sweep_started" and first["objective"] == ACCURACY and first["direction"] == "max"
    assert last["event"] == "sweep_ended" and len({e["trial"] for e in sweep.ends}) == last["num_trials"]
    assert trials is None or last["num_trials"] == trials
    keys = [(e["trial"], e["rung"]) for e in sweep.ends]
    assert len(keys) == len(set(keys)) == len(sweep.of("trial_started"))
    finished = {e["trial"]: e["objective"] for e in sweep.ends if e["status"] == "done"}
    assert sweep.result["best"] == last["best"] == max(finished, key=finished.get)
    assert sweep.result["best_objective"] == last["best_objective"] == max(finished.values())
    for number, trial in enumerate(sorted({e["trial"] for e in sweep.ends})):
        assert trial == f"{number:04d}" and (sweep.directory / "trials" / trial / "config.gin").exists()


def test_the_objective_is_that_of_the_finished_run_and_the_reports_are_its_evaluations(done: Done) -> None:
    sweep = done["bayesian"]
    for event in sweep.ends:
        result = json.loads((sweep.directory / "trials" / event["trial"] / "result.json").read_text())
        assert event["objective"] == result["eval_metrics"]["sparse_categorical_accuracy"]
        reports = sweep.of("trial_reported", trial=event["trial"])
        points = sweep.metrics(event["trial"])
        assert [e["epoch"] for e in reports] == [1, 2, 3, 4] == [p["epoch"] for p in points]
        assert [e["objective"] for e in reports] == [p["sparse_categorical_accuracy"] for p in points]


def test_each_trial_has_a_run_directory_of_its_own_for_what_callbacks_write(done: Done) -> None:
    sweep = done["random"]
    trials = sorted((sweep.directory / "trials").iterdir())
    assert len(trials) == 3
    for trial in trials:
        header, line = (trial / "of-callback.csv").read_text().splitlines()
        row = dict(zip(header.split(","), line.split(","), strict=True))
        assert float(row[ACCURACY]) == pytest.approx(sweep.metrics(trial.name)[0][ACCURACY.removeprefix("val_")])
        assert "keras.callbacks.CSVLogger.filename = '%RUN_DIR/of-callback.csv'" in (trial / "config.gin").read_text()
    assert not (sweep.directory / "of-callback.csv").exists()


def test_a_trial_that_diverges_is_infeasible_and_the_sweep_goes_on(done: Done) -> None:
    ends = {json.dumps(values): status for values, status, *_ in done["grid"].outcomes.values()}
    assert len(ends) == 8
    assert all(status == ("infeasible" if "1e+30" in values else "done") for values, status in ends.items())
    messages = [e["message"] for e in done["grid"].ends if e["status"] == "infeasible"]
    assert all("Training diverged" in message for message in messages)
    assert f"No trial has a {ACCURACY}, so best.gin is not written. 1 of 1 trial: Training diverged" in done.errors


def test_tensorboard_shows_each_trial_with_its_values_metrics_and_end(done: Done) -> None:
    sweep = done["grid"]
    asked = {"startIndex": 0, "sliceSize": 10, "colParams": [{"hparam": name} for name in (RATE, SIZE, CALLS)]}
    asked |= {"allowedStatuses": list(SHOWN_ENDS.values())}
    with tensorboard(sweep.directory) as server:
        experiment = server.ask("hparams/experiment", {"experimentName": ""})
        groups = server.ask("hparams/session_groups", asked)["sessionGroups"]
        texts = server.ask("text/tags")
    assert {each["name"] for each in experiment["hparamInfos"]} >= {RATE, SIZE, CALLS}
    ends = {event["trial"]: event for event in sweep.ends}
    assert {end["status"] for end in ends.values()} == set(SHOWN_ENDS) and len(groups) == len(ends)
    for group in groups:
        name = group["name"]
        (started,) = sweep.of("trial_started", trial=name)
        values = started["values"]
        assert group["hparams"] == {RATE: values[RATE], SIZE: values[SIZE], CALLS: f"{values[CALLS]}"}
        assert [each["status"] for each in group["sessions"]] == [SHOWN_ENDS[ends[name]["status"]]]
        if ends[name]["status"] == "done":
            shown = {(each["name"]["group"], each["name"]["tag"]): each["value"] for each in group["metricValues"]}
            assert shown["eval", ACCURACY.removeprefix("val_")] == pytest.approx(ends[name]["objective"])
            assert texts[f"trials/{name}/tensorboard"] == ["config.gin"]


def test_values_that_cannot_be_trained_are_infeasible_once_others_could(done: Done) -> None:
    ends = done["unfit"].ends
    assert [e["status"] for e in ends] == ["done", *["infeasible"] * 4, "done"]
    assert all("tiny.linear() failed" in e["message"] for e in ends[1:5])


def test_a_trial_that_goes_on_continues_from_its_checkpoint(done: Done) -> None:
    sweep = done["hyperband"]
    finished = [e for e in sweep.ends if e["status"] == "done" and e["rung"] > 0]
    assert finished
    for event in finished:
        trial = event["trial"]
        epochs = [e["epochs"] for e in sweep.of("trial_started", trial=trial)]
        assert epochs == sorted(set(epochs)) and epochs[-1] == 4
        assert [e["epoch"] for e in sweep.of("trial_reported", trial=trial)] == [1, 2, 3, 4]
        result = json.loads((sweep.directory / "trials" / trial / "result.json").read_text())
        assert result["resumed_from_step"] == 15 * epochs[-2] and result["steps"] == 60
    assert {e["status"] for e in sweep.ends} == {"done", "paused"}


def test_poor_trials_are_stopped_early(done: Done) -> None:
    outcomes = done["median"].outcomes.values()
    stopped = [(values[RATE], epochs) for values, status, _, epochs in outcomes if status == "stopped"]
    assert stopped and all(rate < 1e-4 and epochs < EPOCHS for rate, epochs in stopped)
    assert all(status == "done" for values, status, *_ in outcomes if values[RATE] > 0.1)


def test_a_sweep_in_a_bucket_leaves_and_goes_on(gcs: GcsServer, tmp_path: pathlib.Path, gin_file: pathlib.Path) -> None:
    place, log = "gs://bucket/sweep", tmp_path / "log"
    space = f"tune.space = {{'{RATE}': @space.choice(values=[0.1, 0.2, 0.3, 0.4])}}"
    command = arguments(gin_file, place, "tune.search = @search.Grid()", space, *SLOW)

    def trials() -> set[str]:
        return {name.split("/")[0] for name in files.list_tree(f"{place}/trials")}

    with running(command, log) as chief:
        chief.until(lambda: "trial 0002 started" in chief.output and files.exists(f"{place}/trials/0002/run.json"))
        chief.signal(signal.SIGTERM)
        assert chief.end() == 143, chief.output
        chief.wait_until_all_gone()
    assert trials() == {"0000", "0001", "0002"}
    finish(command, log)
    events = [json.loads(line) for line in files.read(f"{place}/sweep.jsonl").splitlines()]
    ends = [e for e in events if e["event"] == "trial_ended" and e["status"] != "interrupted"]
    assert [(e["trial"], e["status"], e["epochs"]) for e in ends] == [(f"000{i}", "done", EPOCHS) for i in range(4)]
    reported = [(e["trial"], e["epoch"]) for e in events if e["event"] == "trial_reported"]
    assert len(reported) == len(set(reported)) == 4 * EPOCHS
    assert not [name for name in files.list_tree(place) if name.endswith(".lease")]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("bayesian", BAYESIAN), pytest.param("optuna", OPTUNA, marks=pytest.mark.skipif(not HAS_OPTUNA, reason="optuna"))],
)
def test_a_sweep_whose_chief_is_killed_twice_equals_the_uninterrupted_one(
    done: Done, tmp_path: pathlib.Path, gin_file: pathlib.Path, name: str, settings: tuple[str, ...]
) -> None:
    sweep, log = Sweep(tmp_path / "sweep"), tmp_path / "log"
    command = arguments(gin_file, sweep.directory, *settings)
    with running(command, log) as chief:
        chief.until(lambda: len(sweep.ends) == 2 and sweep.of("trial_started", trial="0002") and sweep.pid("0002"))
        chief.kill()
    assert not sweep.of("trial_ended", trial="0002")
    with running(command, log) as chief:
        chief.until(lambda: len(sweep.ends) == 4 and sweep.of("trial_started", trial="0004") and sweep.pid("0004"))
        chief.signal(signal.SIGTERM)
        assert chief.end() == 143
        assert "The same command resumes" in chief.output
    assert not (sweep.directory / "result.json").exists()
    finish(command, log)
    assert sweep.outcomes == done[name].outcomes
    assert sweep.of("trial_ended", trial="0002", status="interrupted")
    assert len(sweep.ends) == 6 and sweep.result["best"] == done[name].result["best"]


def test_a_killed_worker_loses_no_trial(tmp_path: pathlib.Path, gin_file: pathlib.Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    parameters = (
        "tune.max_trials = 3",
        "tune.num_workers = 2",
        *SLOW,
        "train.checkpoint = @policy.CheckpointPolicy(every_epochs=1)",
    )
    command = arguments(gin_file, sweep.directory, "from tfdist.checkpoint import policy", *parameters)
    with running(command, tmp_path / "log") as chief:
        chief.until(lambda: len(sweep.of("trial_reported", trial="0001")) > 3)
        os.kill(sweep.pid("0001"), signal.SIGKILL)
        assert chief.end() == 0, chief.output
    assert sweep.of("trial_ended", trial="0001", status="interrupted")[0]["message"].endswith("status 137 (SIGKILL)")
    assert sorted(e["trial"] for e in sweep.ends) == ["0000", "0001", "0002"]
    assert all(e["status"] == "done" for e in sweep.ends)
    assert [e["epoch"] for e in sweep.of("trial_reported", trial="0001")] == [*range(1, EPOCHS + 1)]
    result = json.loads((sweep.directory / "trials" / "0001" / "result.json").read_text())
    assert result["resumed_from_step"] > 0


def test_a_sweep_that_ends_before_its_first_evaluation_loses_no_checkpoint(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    sweep, log = Sweep(tmp_path / "sweep"), tmp_path / "log"
    saving = ("from tfdist.checkpoint import policy", "train.checkpoint = @policy.CheckpointPolicy(every_steps=5)")
    budget = ("tune.max_trials = 1", "train.epochs = 1", "train.callbacks = [@tiny.HeldInEpoch()]")
    command = arguments(gin_file, sweep.directory, *saving, *budget)
    with held(gin_file), running(command, log) as chief:
        chief.until(lambda: list((sweep.directory / "trials/0000/checkpoints").glob("*/manifest.json")))
        chief.kill()
    assert not sweep.of("trial_reported")
    finished = support.run_python(["-m", "tfdist.main", *command, "--gin_param=tune.seed = 7"])
    assert finished.status == 2 and "holds another sweep" in finished.stderr, finished.outputs()
    finish(command, log)
    assert len(sweep.of("sweep_started")) == 1 and [e["status"] for e in sweep.ends] == ["done"]
    assert json.loads((sweep.directory / "trials/0000/result.json").read_text())["resumed_from_step"] > 0


def test_what_the_first_trial_cannot_do_ends_the_sweep_with_its_message_and_makes_room_for_another(done: Done) -> None:
    assert "tune.objective is 'val_acuracy', which is not reported" in done.errors
    assert "Reported: loss, sparse_categorical_accuracy, val_loss, val_sparse_categorical_accuracy." in done.errors
    assert "tune.objective is 'val_loss', and nothing is evaluated. Write train.eval_data" in done.errors
    assert "The first trial cannot be trained: tiny.linear() failed" in done.errors
    assert "tiny.linear.units = 'wide'" in done.errors
    sweep = done["model"]
    assert len(sweep.of("sweep_started")) == 1 and [e["status"] for e in sweep.ends] == ["done"]


def test_a_finished_sweep_can_have_more_trials_and_no_other_sweep_in_its_place(
    done: Done, tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    sweep, before = Sweep(tmp_path / "sweep"), done["bayesian"]
    shutil.copytree(before.directory, sweep.directory)
    commands = [
        arguments(gin_file, sweep.directory, *BAYESIAN),
        arguments(gin_file, sweep.directory, *BAYESIAN, "tune.max_trials = 7"),
        arguments(gin_file, sweep.directory, *BAYESIAN, "tune.max_trials = 5"),
        arguments(gin_file, sweep.directory, *BAYESIAN, "tune.objective = 'val_loss'"),
        arguments(gin_file, sweep.directory, *BAYESIAN, "train.global_batch_size = 32"),
    ]
    finished = run_several(commands, [0, 0, 2, 2, 2])
    assert [e["num_trials"] for e in sweep.of("sweep_ended")] == [6, 6, 7]
    assert {key: outcome for key, outcome in sweep.outcomes.items() if key[0] != "0006"} == before.outcomes
    assert len(sweep.of("trial_started")) == 7 and sweep.result["num_trials"] == 7
    assert "| 7/7 trials | best" in finished.stdout and sweep.of("sweep_resumed")[-1]["max_trials"] == 7
    assert sweep.result["wall_seconds"] > before.result["wall_seconds"]
    assert "holds a sweep of 7 trials, and tune.max_trials is 5. Write tune.max_trials = 7 or more" in finished.stderr
    assert "holds another sweep; the objective: there val_sparse_categorical_accuracy, here val_loss" in finished.stderr
    assert "holds another sweep; the configuration: its settings differ" in finished.stderr


def test_kills_without_end_end_the_sweep_and_do_not_make_good_values_infeasible(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    killed = """
import os, signal
def killed(times):
    kills = FILE.with_name("kills")
    kills.touch()
    if kills.stat().st_size < times:
        with kills.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return digits()
"""
    own = tmp_path / "own"
    own.mkdir()
    for name in ("tiny.gin", "digits.npz"):
        (own / name).write_bytes((gin_file.parent / name).read_bytes())
    (own / "tiny.py").write_text((gin_file.parent / "tiny.py").read_text() + killed)
    times = MAX_INTERRUPTIONS + 4
    parameters = ("tune.max_trials = 1", "train.train_data = @tiny.killed", f"tiny.killed.times = {times}")
    sweep = Sweep(tmp_path / "sweep")
    command = arguments(own / "tiny.gin", sweep.directory, *parameters)
    with running(command, tmp_path / "log") as chief:
        assert chief.end() == 4, chief.output
    assert not sweep.ends and len(sweep.of("trial_ended", status="interrupted")) == MAX_INTERRUPTIONS
    assert chief.output.count("The sweep makes no progress") == 1 and "Traceback" not in chief.output
    finish(command, tmp_path / "log")
    interrupted = sweep.of("trial_ended", status="interrupted")
    assert all(e["message"] == "its process ended with status 137 (SIGKILL)" for e in interrupted)
    assert [e["status"] for e in sweep.ends] == ["done"] and len(interrupted) == times


def test_a_sweep_goes_on_after_the_fork_server_was_killed_and_after_ctrl_c_and_a_hangup(
    tmp_path: pathlib.Path, gin_file: pathlib.Path
) -> None:
    sweep, log = Sweep(tmp_path / "sweep"), tmp_path / "log"
    command = arguments(gin_file, sweep.directory, "tune.max_trials = 3", *SLOW)

    def pid_of(trial: str) -> int | None:
        return sweep.pid(trial) if sweep.of("trial_reported", trial=trial) else None

    with running(command, log) as chief:
        trial = psutil.Process(chief.until(lambda: pid_of("0000")))
        trial.parent().kill()
        assert chief.end() == 1
        assert "The process that starts the trials was killed" in chief.output and "Traceback" not in chief.output
        chief.wait_until_all_gone()
    for name, interrupt, status in (("0001", signal.SIGINT, 130), ("0002", signal.SIGHUP, 143)):
        with running(command, log) as chief:
            chief.until(lambda name=name: pid_of(name))
            chief.signal(interrupt)
            assert chief.end() == status
            assert "Left after the running trials had saved. The same command resumes from there." in chief.output
    finish(command, log)
    names = ["0000", "0001", "0002"]
    assert [(e["trial"], e["status"]) for e in sweep.ends] == [(name, "done") for name in names]
    for name in names:
        assert [e["epoch"] for e in sweep.of("trial_reported", trial=name)] == [*range(1, EPOCHS + 1)]
    assert [e["trial"] for e in sweep.of("trial_ended", status="interrupted")] == names
    for name in names[1:]:
        result = json.loads((sweep.directory / "trials" / name / "result.json").read_text())
        assert result["resumed_from_step"] > 0
