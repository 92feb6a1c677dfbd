"""A run whose loss is not finite goes back to its newest checkpoint, trains on at a lower rate, and ends well."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import support
from equivalence.cases import DIVERGING
from equivalence.runs import assert_close, assert_same_bits, load_weights
from mistakes import each_is_refused
from training.trainings import Trained, run

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import DivergedError
from tfdist.training.recovery.rollback import Rollback

pytestmark = pytest.mark.slow

ONCE = [{"step": 9, "rate": 1e-14, "microbatches": 1}]  # from the checkpoint at step 6


class Raises(keras.callbacks.Callback):
    """Ends the process's training, once, after a step of its attempts."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps, self._step = 0, step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == self._step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run on one device that nobody kills."""
    return run(tmp_path_factory.mktemp("whole"), **DIVERGING, callbacks=[Raises(10**6)])


def test_the_learning_rate_falls_for_good_and_the_run_ends_well(tmp_path: pathlib.Path, whole: Trained) -> None:
    found = whole
    slow = {"optimizer": lambda: keras.optimizers.SGD(0.01), "recovery": "off"}
    clean = run(tmp_path, **(DIVERGING | slow))
    assert_close(found.weights(), clean.weights(), tolerance=1e-6)
    assert json.loads((found.directory / "rollbacks.json").read_text()) == ONCE
    (note,) = found.result.notes
    assert note.startswith(
        "The result was reached with 1e-14 times the learning rate that is set: the loss or a gradient"
    )
    assert note.endswith("was not finite at step 9.")
    (event,) = found.events("rolled_back")
    assert (
        "step 9: the loss or a gradient is not finite. Going back to the newest checkpoint"
        in event["details"]["message"]
    )
    assert "1e-14 times the learning rate" in event["details"]["message"]
    points = found.points("train")
    assert [p["step"] for p in points] == [7, 14] and points[-1]["learning_rate"] == pytest.approx(0.01)
    assert (found.result.steps, len(found.result.starts)) == (14, 1)


@pytest.mark.parametrize("killed_after", [8, 10, 12])
def test_a_run_that_is_killed_around_it_ends_with_the_same_bits(
    tmp_path: pathlib.Path, whole: Trained, killed_after: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **DIVERGING, callbacks=[Raises(killed_after)])
    found = run(tmp_path, **DIVERGING, callbacks=[Raises(10**6)])
    assert found.bits() == whole.bits() and found.result.notes == whole.result.notes
    assert json.loads((tmp_path / "rollbacks.json").read_text()) == ONCE


class Spoils(keras.callbacks.Callback):
    """Makes the weights not a number, once, after so many steps of its attempts."""

    seen = 0

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps_before = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        Spoils.seen += 1
        if Spoils.seen == self._steps_before:
            kernel = self.model.layers[-1].kernel
            kernel.assign(np.full(kernel.shape, np.nan))


@pytest.mark.parametrize("step", [2, 9])
def test_without_a_setting_a_spoilt_run_goes_back_and_says_so(tmp_path: pathlib.Path, step: int) -> None:
    Spoils.seen = 0
    settings = {"checkpoint": CheckpointPolicy(every_steps=5), "optimizer": lambda: keras.optimizers.SGD(0.01)}
    history = keras.callbacks.History()
    found = run(tmp_path / "spoilt", **settings, callbacks=[Spoils(step), history])
    assert found.result.steps == 14 and f"was not finite at step {step + 1}." in found.result.notes[-1]
    assert len(found.events("rolled_back")) == 1 and len(found.result.starts) == 1
    assert len(history.history["loss"]) == 2  # nothing of the failed attempt
    assert found.points("train")[-1]["learning_rate"] == pytest.approx(0.001)
    if step == 2:  # no checkpoint was there, and the run began again
        slow = {"optimizer": lambda: keras.optimizers.SGD(0.001)}
        assert_close(found.weights(), run(tmp_path / "clean", **(settings | slow)).weights(), tolerance=1e-6)


def test_a_callback_that_ends_a_diverged_run_and_a_deterministic_one_are_obeyed(tmp_path: pathlib.Path) -> None:
    for name, changes in (("callback", {}), ("deterministic", {"deterministic": True}), ("off", {"recovery": "off"})):
        Spoils.seen = 0
        ending = [keras.callbacks.TerminateOnNaN()] if name == "callback" else []
        ended = run(tmp_path / name, **changes, callbacks=[Spoils(2), *ending], may_fail=True)
        assert isinstance(ended.error, DivergedError) and not (tmp_path / name / "rollbacks.json").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run of two replicas that nobody kills, which ends with the same bits wherever they are."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    support.run_module("training.rolling_back", directory, "mirrored2", "none").check()
    return directory


@pytest.mark.slow
@pytest.mark.horovod
def test_workers_that_are_killed_around_it_end_with_the_same_bits(
    tmp_path: pathlib.Path, undisturbed: pathlib.Path
) -> None:
    launch = (*support.LAUNCH["horovod"], "--max_restarts=4", "--backoff_seconds=0.1")
    runs = (undisturbed, tmp_path / "run")
    support.run_module("training.rolling_back", runs[1], "horovod", "twice", launch=launch).check()
    assert {mark.name for mark in tmp_path.glob("died-*")} == {"died-back", "died-later"}
    assert_same_bits(*map(load_weights, runs))
    assert [json.loads((each / "rollbacks.json").read_text()) for each in runs] == [ONCE, ONCE]
    starts = [json.loads((each / "result.json").read_text())["starts"] for each in runs]
    assert [len(each) for each in starts] == [1, 3]


def test_too_many_failures_end_the_run(tmp_path: pathlib.Path) -> None:
    policy = {"recovery": Rollback(rate=0.5, most_failures=2)}
    failed = run(tmp_path, **(DIVERGING | policy), may_fail=True)
    assert isinstance(failed.error, DivergedError) and failed.error.exit_status == 3
    assert "The run went back 2 times, as train.recovery says." in str(failed.error)
    assert not (tmp_path / "result.json").exists()


test_a_mistake_is_one_message = each_is_refused(
    lambda settings: Rollback(**settings),
    ({"rate": 1.0}, "Rollback.rate is 1.0; write a factor between 0 and 1"),
    ({"most_failures": 0}, "Rollback.most_failures is 0; write a whole number of at least 1."),
)
