"""`tfdist prove` proves an experiment that trains alike everywhere, and names what does not in one that has a fault."""

from __future__ import annotations

import json
import pathlib

import pytest
import support

pytestmark = pytest.mark.slow

EXPERIMENT = """
import unequal_experiments
train.model = @unequal_experiments.build_model
unequal_experiments.build_model.fault = {fault!r}
train.task = @unequal_experiments.build_task()
unequal_experiments.build_task.fault = {fault!r}
train.train_data = @unequal_experiments.load_rows
train.optimizer = @keras.optimizers.SGD
keras.optimizers.SGD.learning_rate = 0.1
train.global_batch_size = 16
train.epochs = 2
train.seed = 1
"""
ROWS, STATE = "The first loss differs already", "a state or a random generator is in no checkpoint"
OTHER = "Each training on the engine has other numbers"
LAST_WINS = {  # settings of faults that are not the model's
    "data without a seed": ["train.train_data=@unequal_experiments.load_unseeded"],
    "clock": ["train.callbacks=[@unequal_experiments.Clocked()]"],
    "rate by process": ["train.optimizer=@unequal_experiments.ByProcess"],
}


def prove(directory: pathlib.Path, fault: str, *flags: str) -> support.Finished:
    path = directory / "experiment.gin"
    path.write_text(EXPERIMENT.format(fault=fault))
    command = ["-m", "tfdist", "prove", path, *LAST_WINS.get(fault, []), "--steps=3", *flags]
    return support.run_python(command, env=support.TESTS_PATH, timeout=600)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("mean of the batch", [ROWS, "dense/kernel"]),
        ("permuted rows", [ROWS, "train loss"]),
        ("loss of the rows", [ROWS]),
        ("noise without a seed", [ROWS, STATE]),
        ("largest seen", ["Replicas have other values of largest_seen/largest"]),
        ("data without a seed", [OTHER]),
        ("clock", [OTHER, "learning_rate"]),
        ("rate by process", [OTHER, "weights: "]),
        ("next value", ["does not train there", "overwrite_with_gradient"]),
        ("largest output", ["does not train there", "The metric 'largest' is not made of sums"]),
    ],
    ids=str,
)
def test_a_fault_is_named(tmp_path: pathlib.Path, fault: str, named: list[str]) -> None:
    found = prove(tmp_path, fault, "--devices=2")
    assert found.status == 8 and "not proven" in found.stdout, found
    assert all(text in found.stdout for text in named), found.stdout


@pytest.mark.parametrize(
    "engine",
    [
        ["--devices=3"],
        ["--workers=2"],
        pytest.param(["--workers=2", "--launcher=horovod"], marks=pytest.mark.horovod),
    ],
    ids=str,
)
def test_an_experiment_with_dropout_is_proven(tmp_path: pathlib.Path, engine: list[str]) -> None:
    found = prove(tmp_path, "", *engine, "--json").check()
    report = json.loads(found.stdout)
    assert report["proven"] and report["repeats"] and report["resumes"] and report["steps"] == 3
    assert max(report["difference"].values()) < 1e-6 and report["difference"]["seeds"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Received no engine. Write one of --devices=2"),
        (["--devices=2", "--workers=2"], "Received --devices and --workers"),
        (["--devices=2", "--keep=."], "is not empty. Write a new directory."),
        (["--strategy=@tfdist.Mirored()"], "Mirored"),
    ],
    ids=str,
)
def test_what_cannot_be_proven_ends_with_one_message(tmp_path: pathlib.Path, flags: list[str], message: str) -> None:
    found = prove(tmp_path, "", *flags)
    assert message in found.stdout + found.stderr and found.status in (2, 8), found


def test_runs_are_kept_where_asked(tmp_path: pathlib.Path) -> None:
    prove(tmp_path, "", "--devices=2", f"--keep={tmp_path / 'kept'}").check()
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"one_device", "engine", "again", "resumed"}
