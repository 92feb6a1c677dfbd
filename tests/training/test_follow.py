"""An evaluator beside the training: one point a checkpoint, with the numbers of the training's own evaluation."""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import shutil
import signal
import sys
from typing import Any

import pytest
from crashes import runs
from crashes.pace import PACE
from equivalence.cases import dense_model
from gcs.server import GcsServer
from processes import Running, running, running_workers
from support import REPOSITORY, Finished
from training.test_eval_sets import first_set, second_set, settings
from training.trainings import Trained

from tfdist.checkpoint.catalog import list_checkpoints, remove_all
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import UserError
from tfdist.experiment import evaluate, follow, train
from tfdist.report.run_data import read_run
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import EvaluateSettings

ALL = CheckpointPolicy(every_epochs=1, keep_last=20)
EVALUATOR = {"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"]}, "task": {"type": "evaluator", "index": 0}}


def evaluation(**others: Any) -> EvaluateSettings:
    given: dict[str, Any] = {"model": dense_model, "task": settings(None).task, "global_batch_size": 32}
    return EvaluateSettings(**given | {"data": {"near": first_set, "far": second_set}} | others)


def read_followed(run_dir: str | pathlib.Path) -> list[dict[str, Any]]:
    try:
        lines = files.read(files.join(str(run_dir), "metrics-follow.jsonl")).splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run of three epochs that evaluated nothing and kept all checkpoints."""
    directory = tmp_path_factory.mktemp("trained")
    train(settings(None, checkpoint=ALL), Request(run_dir=str(directory)))
    return directory


@pytest.fixture
def copied(tmp_path: pathlib.Path, trained: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(trained, tmp_path / "run"))


def test_each_checkpoint_has_the_bits_of_the_evaluation_within_the_training(tmp_path: pathlib.Path) -> None:
    request = Request(run_dir=str(tmp_path))
    train(settings({"near": first_set, "far": second_set}, checkpoint=ALL), request)
    for _ in range(2):  # the second finds nothing to do
        follow(evaluation(), request)
    inline, followed = Trained(tmp_path).points("eval"), read_followed(tmp_path)
    assert [point.pop("checkpoint") for point in followed] == [
        pathlib.Path(each.path).name for each in list_checkpoints(RunDirectory(str(tmp_path)).checkpoints)
    ]
    assert len(followed) == 3
    assert followed == [point | {"learning_rate": None} for point in inline]
    assert json.loads((tmp_path / "evaluation.json").read_text())["far_loss"] == inline[-1]["far_loss"]


@pytest.mark.slow
def test_the_best_checkpoint_of_a_set_outlives_the_run_s_own_and_the_report_has_all(copied: pathlib.Path) -> None:
    request, policy = Request(run_dir=str(copied)), CheckpointPolicy(keep_best="val_far_loss", best_mode="max")
    with pytest.raises(UserError, match="'val_near', which is not reported"):
        follow(evaluation(checkpoint=CheckpointPolicy(keep_best="val_near", best_mode="min")), request)
    follow(evaluation(checkpoint=policy), request)
    remove_all(RunDirectory(str(copied)).checkpoints)
    followed = read_followed(copied)
    found = evaluate(evaluation(weights="best", checkpoint=policy), request)
    assert found == {name: followed[0][name] for name in found}  # the loss falls from there
    assert len(list_checkpoints(RunDirectory(str(copied)).best)) == 1
    curve = read_run(str(copied)).curves["far_loss", "eval"]
    assert curve.values.tolist() == [point["far_loss"] for point in followed]


def test_the_newest_alone_is_evaluated_where_that_is_asked_for(copied: pathlib.Path) -> None:
    follow(evaluation(only_newest=True), Request(run_dir=str(copied)))
    assert [point["step"] for point in read_followed(copied)] == [21]


def test_a_damaged_checkpoint_is_passed_over(copied: pathlib.Path) -> None:
    first = next(pathlib.Path(RunDirectory(str(copied)).checkpoints).iterdir())
    data = next(path for path in first.iterdir() if path.name != "manifest.json")
    data.write_bytes(data.read_bytes()[:-1] + b"\0\0")
    follow(evaluation(), Request(run_dir=str(copied)))
    assert len(read_followed(copied)) == 2
    assert "Passed over the checkpoint" in (copied / "events-follow.jsonl").read_text()


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({}, ["--mode=train", "--follow"], "--follow works with --mode=evaluate, and this is --mode=train"),
        ({}, ["--gin_param=evaluate.weights = 'last'"], "and --follow evaluates each checkpoint. Leave one"),
        ({"task": {"type": "evaluator", "index": 1}}, [], "a run has one evaluator, whose task.index is 0"),
        ({"cluster": {"ps": ["host2:2222"]}}, ["--mode=train"], "There are no parameter servers"),
    ],
)
def test_a_mistake_is_one_message(
    answer: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], flags: list[str], words: str
) -> None:
    task = {"task": {"type": "worker", "index": 0}} if "cluster" in changes else {}
    monkeypatch.setenv("TF_CONFIG", json.dumps(EVALUATOR | task | changes))
    ended: Finished = answer("--gin_file=tfdist:experiments/digits.gin", *flags)
    assert (ended.status, words in ended.stderr) == (2, True), ended.stderr


@pytest.mark.slow
def test_two_workers_and_an_evaluator_are_killed_twice_each_and_every_point_is_there_once(
    gcs: GcsServer, tmp_path: pathlib.Path
) -> None:
    run_dir = "gs://bucket/run"
    params = [
        "policy.CheckpointPolicy.every_steps = 4",
        "policy.CheckpointPolicy.keep_last = 50",
        "policy.CheckpointPolicy.keep_best = 'val_loss'",
        "train.callbacks = [@experiment.Paced()]",
    ]
    command = runs.command("multi_worker", pathlib.Path("unused"), *params)
    arguments = [each for each in command if each.startswith(("--gin_", "--gin_param"))] + [f"--run_dir={run_dir}"]
    variables = runs.environment() | {PACE: "0.1"}
    evaluator_variables = variables | {"TF_CONFIG": json.dumps(EVALUATOR)}

    def start_evaluator() -> Any:
        return running(arguments, tmp_path / "evaluator.log", evaluator_variables, REPOSITORY)

    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(start_evaluator())
        killed_at = 0
        for lives_left in (2, 1, 0):
            lines = [[sys.executable, "-m", "tfdist.main", *arguments]] * 2
            (tmp_path / str(lives_left)).mkdir()
            with running_workers(lines, tmp_path / str(lives_left), variables, REPOSITORY) as workers:
                if lives_left:
                    evaluator.until(lambda least=killed_at + 2: len(read_followed(run_dir)) >= least)
                    killed_at = len(read_followed(run_dir))
                    for worker in workers:
                        worker.signal(signal.SIGKILL)
                    evaluator.kill()
                    evaluator = stack.enter_context(start_evaluator())
                else:
                    assert [worker.end() for worker in workers] == [0, 0], workers[0].output
        assert evaluator.end() == 0, evaluator.output
    followed = read_followed(run_dir)
    counts = collections.Counter(point["checkpoint"] for point in followed)
    assert set(counts.values()) == {1}
    by_step = {point["step"]: point for point in followed}
    assert sorted(by_step) == [*range(4, 49, 4)]
    undisturbed = tmp_path / "undisturbed"
    command = [*runs.command("mirrored", undisturbed, *params)]
    with Running([sys.executable, "-m", *command], tmp_path / "undisturbed.log", variables, REPOSITORY) as reference:
        assert reference.end() == 0, reference.output
    inline = Trained(undisturbed).points("eval")
    assert [point["step"] for point in inline] == [*range(8, 49, 8)]
    for point in inline:
        assert by_step[point["step"]]["loss"] == pytest.approx(point["loss"], rel=runs.TOLERANCE)
        assert by_step[point["step"]]["epoch"] == point["epoch"]
    (best,) = list_checkpoints(f"{run_dir}/best")
    assert by_step[best.step]["loss"] == min(point["loss"] for point in followed)
