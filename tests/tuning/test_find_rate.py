"""The range test of learning rates, and the check of all parts on two batches, as a user types them."""

from __future__ import annotations

import json
import pathlib
import re
import types
from typing import Any

import keras
import numpy as np
import pytest
from support import REPOSITORY, Finished, run_python

from tfdist.errors import UserError
from tfdist.experiment import train
from tfdist.recipes.groups import Group, Grouped
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings
from tfdist.training.run.validate_run import compare_weights
from tfdist.tuning.find_rate import FindRateSettings, find_rate, range_test

DIGITS = "--gin_file=configs/experiments/digits.gin"
MIRRORED = ("--gin_file=configs/strategies/mirrored.gin", "--gin_param=mirrored.Mirrored.num_cpu_devices = 2")


def command(run_dir: pathlib.Path, *arguments: str) -> Finished:
    return run_python(["-m", "tfdist.main", DIGITS, f"--run_dir={run_dir}", *arguments], cwd=REPOSITORY)


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    settings = FindRateSettings(lowest=1e-5, highest=1.0, steps=101)
    rates = np.array([settings.rate(i) for i in range(101)])
    losses = 2.3 - 2.0 / (1 + np.exp(-3 * (np.log(rates) - np.log(1e-2)))) + 5 * np.clip(np.log(rates / 0.2), 0, None)
    found = range_test(settings, losses.tolist())
    assert 0.8e-2 < found.suggestion < 5e-2  # the smooth losses lag behind
    assert range_test(settings, [2.0 + 0.1 * i for i in range(50)]).suggestion is None


@pytest.mark.slow
def test_rates_are_tried_apart_from_the_run(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    done = command(run_dir, "--mode=find_rate", "--gin_param=train.deterministic = True").check()
    found = json.loads((run_dir / "find_rate.json").read_text())
    assert sorted(path.name for path in run_dir.iterdir()) == ["find_rate.json"]
    assert 1e-4 < found["suggestion"] < 0.3 and f"{found['suggestion']:.2g}" in done.stdout
    assert len(found["rates"]) == len(found["losses"]) >= 30 and found["rates"][0] == pytest.approx(1e-6)
    command(run_dir, "--gin_param=train.epochs = 2", "--gin_param=train.deterministic = True").check()
    before = json.loads((run_dir / "result.json").read_text())
    trained = command(run_dir, "--mode=find_rate", "--gin_param=train.deterministic = True").check()
    assert "fastest" in trained.stdout
    later = json.loads((run_dir / "find_rate.json").read_text())
    assert later["losses"][0] < 0.5 * found["losses"][0]  # of the weights that the run has now
    assert json.loads((run_dir / "result.json").read_text()) == before


@pytest.mark.slow
def test_a_step_has_the_loss_of_its_batch_also_where_an_epochs_last_is_smaller(tmp_path: pathlib.Path) -> None:
    wanted = np.arange(40, dtype=np.float32)[:, None]
    model, task = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), Supervised(loss="mean_squared_error")
    settings = {"model": lambda: model, "task": task, "train_data": lambda: (np.zeros_like(wanted), wanted)}
    settings |= {"optimizer": "sgd", "global_batch_size": 32, "epochs": 1, "shuffle": False, "xla": "off"}
    tiny, request = FindRateSettings(lowest=1e-12, highest=2e-12, steps=10), Request(run_dir=str(tmp_path))
    found = find_rate(tiny, TrainSettings(**settings, strategy=OneDevice()), request, train, lambda line: None)
    assert found.losses == pytest.approx([np.mean(wanted[:32] ** 2), np.mean(wanted[32:] ** 2)] * 5)
    settings |= {"model": lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), "global_batch_size": 40}
    settings |= {"optimizer": Grouped(keras.optimizers.SGD, [Group("kernel|bias", rate=0)])}  # which learns nothing
    high = FindRateSettings(lowest=0.1, highest=0.2, steps=10)
    found = find_rate(high, TrainSettings(**settings, strategy=OneDevice()), request, train, lambda line: None)
    assert found.losses == pytest.approx([np.mean(wanted**2)] * 10)


def test_a_mistake_is_one_message() -> None:
    with pytest.raises(UserError, match=r"find_rate.lowest = 2.0 is not below"):
        FindRateSettings(lowest=2.0)
    with pytest.raises(UserError, match=r"find_rate\.steps is 3; write a whole number of at least 10"):
        FindRateSettings(steps=3)
    training: Any = types.SimpleNamespace(optimizer=None)
    with pytest.raises(UserError, match=r"--mode=find_rate changes train\.optimizer"):
        find_rate(FindRateSettings(), training, Request(run_dir="unused"), lambda *_: None, print)


def test_a_fast_check_names_the_weight_that_a_checkpoint_did_not_give_back() -> None:
    weights = {"layers/dense/vars/0": np.ones(3), "layers/dense/vars/1": np.array([np.nan])}
    compare_weights(weights, {name: value.copy() for name, value in weights.items()})
    with pytest.raises(UserError, match="layers/dense/vars/0 came back from the checkpoint with other values"):
        compare_weights(weights, weights | {"layers/dense/vars/0": np.zeros(3)})


@pytest.mark.slow
def test_a_fast_check_runs_every_part_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "class Fails(keras.callbacks.Callback):\n"
        "    def on_train_end(self, logs=None):\n"
        "        raise ValueError('far too late')\n"
    )
    done = command(run_dir, *MIRRORED, "--gin_param=train.fast_check = True").check()
    assert re.search(
        r"fast check: all parts of the training have run; a checkpoint gave back all \d+ weights; loss", done.stdout
    )
    assert list(run_dir.iterdir()) == []
    gin = tmp_path / "late.gin"
    gin.write_text("from __gin__ import dynamic_registration\nimport mine\ntrain.callbacks = [@mine.Fails()]\n")
    failed = command(run_dir, f"--gin_file={gin}", "--gin_param=train.fast_check = True")
    assert failed.status == 2 and "far too late" in failed.stderr
