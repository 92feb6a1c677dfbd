"""`--mode=evaluate` of a run and of its checkpoints, as a user types it: nothing of the training is repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gcs.server import GcsServer
from support import REPOSITORY, Finished, run_python

from tfdist import main as command
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
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {point["step"]: point for point in points if point["split"] == "eval"}


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


def test_a_directory_without_a_run_is_told(evaluate: Evaluate, tmp_path: Path) -> None:
    ended = evaluate("nothing")
    assert ended.status == 2 and "'nothing' holds no run: there is no nothing/config.gin" in ended.stderr
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_an_experiment_that_says_nothing_of_evaluation_is_evaluated_as_it_was_trained(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import keras, numpy as np\n"
        "def data(n=20): return np.ones((n, 4), np.float32), np.zeros(n, np.float32)\n"
        "def model():\n"
        "    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
    )
    lines = ["import own", "from tfdist.strategies import one_device", "train.strategy = @one_device.OneDevice()"]
    lines += ["train.model = @own.model", "train.train_data = @own.data", "train.eval_data = @own.data"]
    lines += ["train.global_batch_size = 8", "train.epochs = 1"]
    (tmp_path / "own.gin").write_text("\n".join(lines))
    assert command.main(["--gin_file=own.gin", "--run_dir=run"]) == 0
    evaluate("run").check()
    found = evaluation_of(tmp_path / "run")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert found["loss"] == pytest.approx(result["eval_metrics"]["loss"])
    assert found["evaluated"] | {"weights": "", "data": ""} == {
        "weights": "",
        "step": None,
        "data": "",
        "num_examples": 20,
        "strategy": "one_device",
        "num_replicas": 1,
    }


@pytest.mark.slow
def test_a_run_in_a_bucket_is_evaluated(evaluate: Evaluate, gcs: GcsServer) -> None:
    settings = params(*EPOCHS, "train.stop_after_epochs = 1")
    os.chdir(REPOSITORY)
    assert command.main([DIGITS, *settings, "--run_dir=gs://bucket/run"]) == 0
    evaluate("gs://bucket/run", "evaluate.weights = 'last'").check()
    assert evaluation_of("gs://bucket/run")["evaluated"]["step"] == 23


@pytest.mark.slow
def test_modules_beside_the_experiment_are_found_from_another_directory(tmp_path: Path) -> None:
    experiment = REPOSITORY / "examples/diabetes/diabetes.gin"
    args = ["-m", "tfdist.main", f"--gin_file={experiment}", "--gin_param=train.epochs = 1", "--run_dir=run"]
    run_python(args, cwd=tmp_path).check()
    (tmp_path / "elsewhere").mkdir()
    args = ["-m", "tfdist.main", "--mode=evaluate", f"--run_dir={tmp_path / 'run'}"]
    assert "loss" in run_python(args, cwd=tmp_path / "elsewhere").check().stdout


@pytest.mark.slow
def test_two_workers_evaluate_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    args = ["-m", "tfdist.launch", "--workers=2", "--", "--mode=evaluate", f"--run_dir={saved}"]
    run_python([*args, *params("evaluate.weights = 46")], cwd=tmp_path, timeout=300).check()
    found = evaluation_of(saved)
    assert found["evaluated"]["num_replicas"] == 2 and found["evaluated"]["step"] == 46
    assert found["accuracy"] == logged(saved)[46]["accuracy"]
