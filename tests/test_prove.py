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
TWO_REPLICAS = "@tfdist.Mirrored(num_cpu_devices=2)"
LAST_WINS = {  # settings of faults that are not the model's
    "data without a seed": ["train.train_data=@unequal_experiments.load_unseeded"],
    "clock": ["train.callbacks=[@unequal_experiments.Clocked()]"],
    "randomness of NumPy": ["train.train_data=@unequal_experiments.load_global_noise"],
    "evaluation without its tail": ["train.eval_data=@unequal_experiments.load_whole_batches"],
    "skipping optimizer": ["train.optimizer=@unequal_experiments.Skipping"],
}


def prove(directory: pathlib.Path, fault: str, *flags: str) -> support.Finished:
    path = directory / "experiment.gin"
    path.write_text(EXPERIMENT.format(fault=fault))
    command = ["-m", "tfdist", "prove", path, *LAST_WINS.get(fault, []), "--steps=3", *flags]
    return support.run_python(command, env=support.TESTS_PATH, timeout=600)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("mean of the batch", [ROWS, "step 1 and layer dense", "dense/kernel"]),
        ("loss of the rows", [ROWS]),
        ("noise without a seed", [ROWS, STATE]),
        ("largest seen", ["Replicas have other values of largest_seen/largest"]),
        ("randomness of NumPy", [STATE]),
        ("data without a seed", [OTHER]),
        ("evaluation without its tail", ["step 3: loss and metrics: eval", "Only the evaluation differs"]),
        ("clock", [OTHER, "learning_rate"]),
        ("mean of the batch from step 3 on", ["They part at step 3", "The first steps agree: a layer"]),
        ("skipping optimizer", ["The first gradients are the same, and the update is not"]),
        ("next value", ["does not train there", "overwrite_with_gradient"]),
        ("largest output", ["does not train there", "The metric 'largest' is not made of sums"]),
    ],
    ids=str,
)
def test_a_fault_is_named(tmp_path: pathlib.Path, fault: str, named: list[str]) -> None:
    found = prove(tmp_path, fault, "--devices=2", "--nocost")
    assert found.status == 8 and "not proven" in found.stdout, found
    assert all(text in found.stdout for text in named), found.stdout


@pytest.mark.parametrize(
    ("engine", "replicas"),
    [
        (["--devices=3"], [1, 2, 3]),
        (["--workers=2"], [1, 2]),
        pytest.param(["--workers=2", "--launcher=horovod"], [1, 2], marks=pytest.mark.horovod),
    ],
    ids=str,
)
def test_an_experiment_with_dropout_is_proven(tmp_path: pathlib.Path, engine: list[str], replicas: list[int]) -> None:
    found = prove(tmp_path, "", *engine, "--log=json", f"--run_dir={tmp_path / 'kept'}").check()
    report = json.loads(found.stdout)
    assert report["proven"] and report["repeats"] and report["resumes"] and report["steps"] == 3
    assert max(report["difference"].values()) < 1e-6 and report["difference"]["seeds"] == 0
    assert list(report["gradients"]) == ["dense", "dense_1"] and 0 < max(report["gradients"].values()) < 1e-6
    one, *others = report["cost"]
    assert [each["replicas"] for each in (one, *others)] == replicas and one["efficiency"] == 1
    for each in others:
        assert each["efficiency"] == pytest.approx(each["steps_per_second"] / one["steps_per_second"])
        assert (each["without_communication"] is not None) == ("--workers=2" in engine)
    kept = {"one_device", "engine", "again", "resumed", "gradients_one_device", "gradients"}
    timed = {f"timed_{number}" for number in range(len(replicas))}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == kept | timed


@pytest.mark.parametrize(
    ("name", "flags", "named"),
    [
        ("digits", [f"--gin_param=train.strategy = {TWO_REPLICAS}"], "replicas  steps/s"),
        ("digits_adversarial", ["--devices=2", "--nocost"], "Rounding parts them: from the engine's state"),
    ],
)
def test_a_shipped_experiment_is_proven_by_the_mode(name: str, flags: list[str], named: str) -> None:
    command = ["-m", "tfdist.main", "--mode=prove", f"--gin_file=tfdist:experiments/{name}.gin", *flags]
    shown = support.run_python(command, timeout=120).check().stdout
    assert named in shown and "gradients of step 1: conv2d_1" in shown and shown.endswith("\nproven to 1e-05\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Received no engine. Write one of --devices=2"),
        (["--devices=2", "--workers=2"], "Received --devices=2 and --workers=2"),
        (["--devices=a100_40:8"], "Received --devices=a100_40:8. Write a number of replicas"),
        (["--devices=2", "--run_dir=."], "is not empty. Write a new directory."),
        (["--devices=2", "--run_dir=gs://b/p"], "--run_dir=gs://b/p is not local."),
        (["train.strategy=@tfdist.Mirored()"], "Mirored"),
    ],
    ids=str,
)
def test_what_cannot_be_proven_ends_with_one_message(tmp_path: pathlib.Path, flags: list[str], message: str) -> None:
    found = prove(tmp_path, "", *flags)
    assert message in found.stdout + found.stderr and found.status in (2, 8), found
