"""Models of KerasTuner's kind in a sweep by the command, and KerasTuner's own tuners over tfdist's loop."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import keras
import pytest
import support
from mistakes import call, each_is_refused
from tuning import hyper_models
from tuning.sweeps import Sweep, arguments, write_experiment

from tfdist.errors import UserError
from tfdist.strategies.one_device import OneDevice
from tfdist.training.run.train_settings import TrainSettings
from tfdist.tuning.search import hypermodel

EXPERIMENT = """\
import hyper_models
import tiny
from tfdist.strategies import one_device
from tfdist.tuning.search import search
from tfdist.tuning.search import space

train.model = @hyper_models.build
train.train_data = @tiny.digits
train.eval_data = @held_out/tiny.digits
train.strategy = @one_device.OneDevice(device='CPU:0')
train.epochs = 1
train.global_batch_size = 64
train.deterministic = True
held_out/tiny.digits.first = 960
held_out/tiny.digits.last = 1500
tune.objective = 'val_accuracy'
tune.search = @search.Random()
"""
SCRIPT = """\
import hyper_models
import keras_tuner
import tiny

x, y = tiny.digits()
held_out = tiny.digits(960, 1500)
tuner = keras_tuner.RandomSearch(
    hyper_models.Digits(), objective="val_accuracy", max_trials=2, seed=1, directory="tuned", project_name="digits"
)
tuner.search(x, y, validation_data=held_out, epochs=2, batch_size=64, verbose=0)
best = tuner.oracle.get_best_trials(1)[0]
print("statuses", [trial.status for trial in tuner.oracle.trials.values()])
print("score", best.score, tuner.get_best_models(1)[0].evaluate(*held_out, verbose=0)[1])
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("hyper")
    write_experiment(directory)
    shutil.copy(hyper_models.__file__, directory)
    path = directory / "hyper.gin"
    path.write_text(EXPERIMENT)
    return path


@pytest.mark.slow
def test_a_hyper_model_is_swept_as_it_is_and_its_best_trained_again(
    experiment: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    sweep = Sweep(tmp_path / "deep")
    settings = (
        "train.model = @hyper_models.Classifier",
        "train.hyperparameters = {'kind': 'deep'}",
        "tune.space = {'train.seed': @space.choice(values=[1, 2]), "
        "'train.global_batch_size': @space.choice(values=[16, 32])}",
        "tune.num_workers = 2",
    )
    for max_trials in (3, 5):  # the second start learns from the journal what the first one's trials asked for
        command = arguments(experiment, sweep.directory, *settings, f"tune.max_trials = {max_trials}")
        support.run_python(["-m", "tfdist.main", *command]).check()
    space = sweep.events[0]["space"]
    assert list(space) == ["train.seed", "train.global_batch_size", "kind", "layers", "units_0", "learning_rate"]
    assert space["layers"]["under"] == {"kind": ["deep"]} and space["kind"]["values"] == ["deep"]
    assert len(sweep.ends) == 5 and {e["status"] for e in sweep.ends} == {"done"}
    found = [entry["config"]["name"] for event in sweep.ends for entry in event.get("found", [])]
    assert set(found) <= {"units_1", "units_2"} and len(found) == len(set(found))
    for event in sweep.of("trial_started"):
        values, trial = event["values"], sweep.directory / "trials" / event["trial"]
        assert values["kind"] == "deep" and values["train.seed"] in (1, 2)
        assert json.loads((trial / "result.json").read_text())["global_batch_size"] == values["train.global_batch_size"]
        told = json.loads((trial / "hyperparameters.json").read_text())["values"]
        assert {name for name in told if name.startswith("units")} == {f"units_{i}" for i in range(values["layers"])}

    best = tmp_path / "best.gin"
    best.write_text((sweep.directory / "best.gin").read_text())  # wherever it lies
    environment = {"PYTHONPATH": f"{support.REPOSITORY}:{experiment.parent}"}
    command = ["-m", "tfdist.main", *arguments(best, tmp_path / "again", mode="train")]
    support.run_python(command, env=environment).check()
    result = json.loads((tmp_path / "again" / "result.json").read_text())
    assert result["eval_metrics"]["accuracy"] == sweep.result["best_objective"]


@pytest.mark.slow
def test_keras_tuners_own_tuner_trains_by_tfdist(experiment: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = {"PYTHONPATH": f"{support.REPOSITORY}:{experiment.parent}"}
    finished = support.run_python(["-c", SCRIPT], env=environment, cwd=tmp_path).check()
    lines = dict(line.split(" ", 1) for line in finished.stdout.splitlines() if line.startswith(("statuses", "score")))
    assert lines["statuses"] == "['COMPLETED', 'COMPLETED']"
    score, evaluated = map(float, lines["score"].split())
    assert score == pytest.approx(evaluated, abs=1e-6) and score > 0.3
    result = json.loads((tmp_path / "tuned/digits/trial_0/tfdist-0/result.json").read_text())
    assert result["epochs"] == 2 and result["global_batch_size"] == 64
    assert "epoch" not in finished.stdout  # verbose=0


@pytest.mark.slow
def test_one_name_in_two_scopes_is_refused() -> None:
    def build(hp: Any) -> Any:
        kind = hp.Choice("optimizer", ["sgd", "adam"])
        for each in ("sgd", "adam"):
            with hp.conditional_scope("optimizer", [each]):
                if kind == each:
                    hp.Float("lr", 1e-5, 1e-2, sampling="log")
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    with pytest.raises(UserError, match="'lr' stands in two conditional scopes"):
        hypermodel.HyperModel(build, {}).find_space()
    hypermodel.HyperModel(build, {"lr": 0.1}).find_space()


def build_model(model: Any, values: Any) -> Any:
    given = {"model": model, "hyperparameters": values, "train_data": lambda: None, "strategy": OneDevice()}
    return hypermodel.builder_of(TrainSettings(**given, global_batch_size=8, epochs=1))


test_what_is_no_hyper_model_is_refused = each_is_refused(
    call,
    (
        lambda: hypermodel.HyperModel(hyper_models.Shuffled, {}),
        r"Shuffled\.fit is overridden.*write in the gin file train\.global_batch_size",
    ),
    (lambda: build_model(lambda: None, {"units": 3}), "the model takes none. It must be a function build(hp)"),
    (lambda: build_model(hyper_models.build, 3), "must be a dict"),
)
