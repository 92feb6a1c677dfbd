"""`--mode=evaluate` of a run and of its checkpoints, as a user types it: nothing of the training is repeated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY, Finished, run_python
from training.trainings import Trained

from tfdist.storage import files

DIGITS = "--gin_file=configs/experiments/digits.gin"
EPOCHS = (
    "from tfdist.checkpoint import policy",
    "train.checkpoint = @policy.CheckpointPolicy(every_epochs=1, keep_last=5, keep_best='val_accuracy')",
    "train.deterministic = True",
    "train.epochs = 4",
)
Evaluate = Callable[..., Finished]


def params(*texts: str) -> list[str]:
    return [f"--gin_param={text}" for text in texts]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left after three of its four epochs, with a checkpoint of each."""
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    settings = params(*EPOCHS, "train.stop_after_epochs = 3")
    run_python(["-m", "tfdist.main", DIGITS, *settings, f"--run_dir={run_dir}"], cwd=REPOSITORY).check()
    return run_dir


@pytest.fixture
def evaluate(answer: Callable[..., Finished]) -> Evaluate:
    """Calls the command in another directory than that of the training."""
    return lambda run_dir, *settings: answer("--mode=evaluate", f"--run_dir={run_dir}", *params(*settings))


def evaluation_of(run_dir: Path | str) -> dict[str, Any]:
    return json.loads(files.read(f"{run_dir}/evaluation.json"))


def logged(run_dir: Path) -> dict[int, dict[str, Any]]:
    """What the training found at its own evaluations, by step."""
    return {point["step"]: point for point in Trained(run_dir).points("eval")}


@pytest.mark.slow
def test_each_checkpoint_is_evaluated_to_what_the_training_found_there(saved: Path, evaluate: Evaluate) -> None:
    points = logged(saved)
    assert list(points) == [23, 46, 69]
    best = max(points, key=lambda step: (points[step]["accuracy"], step))
    directory = next((saved / "checkpoints").glob("step-000000000046-*"))
    for weights, step in (("'last'", 69), ("'best'", best), ("23", 23), (f"'{directory}'", 46), (f"'{saved}'", 69)):
        ended = evaluate(saved, f"evaluate.weights = {weights}").check()
        assert f"step {step}" in ended.stdout
        found = evaluation_of(saved)
        assert found["accuracy"] == points[step]["accuracy"] and found["loss"] == pytest.approx(points[step]["loss"])
        evaluated = found["evaluated"]
        assert evaluated["step"] == step and f"step-{step:012d}-" in evaluated["weights"]
        assert (evaluated["num_examples"], evaluated["num_replicas"]) == (360, 1)
        assert "load_digits" in evaluated["data"]
    assert "best val_accuracy" in evaluate(saved, "evaluate.weights = 'best'").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], ["There are no trained weights", "evaluate.weights = 'last'", "23, 46, 69"]),
        (["evaluate.weights = 24"], ["no checkpoint of step 24", "23, 46, 69"]),
        (["evaluate.weights = 3.5"], ["evaluate.weights is 3.5", "'best', 'last', a step"]),
        (["evaluate.weights = True"], ["evaluate.weights is True"]),
        (["evaluate.weights = ''"], ["evaluate.weights is ''"]),
        (["evaluate.weights = 'bset'"], ["'bset' is no weights", "'best'"]),
        (["evaluate.weights = 'none.keras'"], ["no file", "'none.keras'"]),
        (["evaluate.weights = 'best'", "evaluate.checkpoint = 'auto'"], ["keep_best", "23, 46, 69"]),
        (["evaluate.weights = 'last'", "convnet.build_convnet.num_classes = 11"], ["does not fit", "[11]"]),
    ],
)
def test_weights_that_are_not_there_are_told_with_those_that_are(
    saved: Path, evaluate: Evaluate, settings: list[str], words: list[str]
) -> None:
    ended = evaluate(saved, *settings)
    assert ended.status == 2 and ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr
    assert all(word in ended.stderr for word in words), ended


@pytest.mark.slow
def test_two_workers_evaluate_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    args = ["-m", "tfdist.launch", "--workers=2", "--", "--mode=evaluate", f"--run_dir={saved}"]
    run_python([*args, *params("evaluate.weights = 46")], cwd=tmp_path, timeout=300).check()
    found = evaluation_of(saved)
    assert found["evaluated"]["num_replicas"] == 2 and found["evaluated"]["step"] == 46
    assert found["accuracy"] == logged(saved)[46]["accuracy"]
