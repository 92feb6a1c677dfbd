"""A run whose loss is not finite goes back to its newest checkpoint, does otherwise from there, and ends well."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import support
from equivalence.cases import TOO_LARGE, digits, linear_model, poisoned_digits, sgd, spiking_digits
from training.trainings import run

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import DivergedError, UserError
from tfdist.training.recovery.rollback import Rollback

POISONED = {
    "model": linear_model,
    "train_data": poisoned_digits,
    "shuffle": False,
    "epochs": 2,
    "eval_data": None,
    "deterministic": True,
    "on_divergence": Rollback(),
    "checkpoint": CheckpointPolicy(every_epochs=10),  # none by the clock: where the newest is changes what follows
}
FAILS = 4  # the step whose batch holds what is no number


def without_the_batch() -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits()
    kept = np.r_[0 : 3 * 64, 4 * 64 : len(images)]
    return images[kept], labels[kept]


class Raises(keras.callbacks.Callback):
    """Ends the process's training, once, after a step of its second attempt."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps, self._step = 0, step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == self._step:
            raise KeyboardInterrupt


def test_the_batch_is_left_out_and_the_run_ends_well(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path / "poisoned", **POISONED)
    clean = run(tmp_path / "clean", **(POISONED | {"train_data": without_the_batch, "on_divergence": None}))
    assert found.bits() == clean.bits()
    assert (found.result.steps, clean.result.steps) == (14, 12)
    failures = json.loads((tmp_path / "poisoned" / "rollbacks.json").read_text())
    assert [(each["step"], each["back_to"]) for each in failures] == [(FAILS, 0), (7 + FAILS, 0)]
    left_out = [event["step"] for event in found.events("batch_left_out")]
    assert left_out[-2:] == [FAILS, 7 + FAILS]
    (first, second) = found.result.notes
    assert "step 4: the loss or a gradient is not finite. Going back to the newest checkpoint" in first
    assert "leaving out the batches of 1 steps" in first
    assert "step 11" in second
    assert [p["step"] for p in found.points("train")] == [7, 14]
    assert len(found.result.starts) == 1


def test_the_learning_rate_falls_for_good(tmp_path: pathlib.Path) -> None:
    policy = Rollback(skip_steps=1, rate=0.5)
    found = run(tmp_path / "poisoned", **(POISONED | {"epochs": 1, "on_divergence": policy}))

    def slower() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.5 * float(sgd().learning_rate))

    expected = run(
        tmp_path / "clean",
        **(POISONED | {"epochs": 1, "train_data": without_the_batch, "on_divergence": None, "optimizer": slower}),
    )
    for ours, theirs in zip(found.weights(), expected.weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("killed_after", [4, 6, 9])
def test_a_run_that_is_killed_around_it_ends_with_the_same_bits(tmp_path: pathlib.Path, killed_after: int) -> None:
    policy = {"on_divergence": Rollback(skip_steps=2, rate=0.5), "checkpoint": CheckpointPolicy(every_steps=5)}
    expected = run(tmp_path / "whole", **(POISONED | policy), callbacks=[Raises(10**6)])
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, **(POISONED | policy), callbacks=[Raises(killed_after)])
    found = run(cut, **(POISONED | policy), callbacks=[Raises(10**6)])
    assert found.bits() == expected.bits()
    assert (cut / "rollbacks.json").read_text() == (tmp_path / "whole" / "rollbacks.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["multi_worker", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_workers_that_are_killed_around_it_end_with_the_same_bits(tmp_path: pathlib.Path, strategy: str) -> None:
    launch = ["-m", "tfdist.launch", "--workers=2", "--max_restarts=4", "--backoff_seconds=0.1"]
    launch += ["--launcher=horovod"] if strategy == "horovod" else []
    runs = {kills: tmp_path / kills / "run" for kills in ("none", "twice")}
    for kills, directory in runs.items():
        program = [*launch, "--module=training.rolling_back", "--", directory, strategy, kills]
        support.run_python(program, env=support.TESTS_PATH, timeout=400).check()
    assert {mark.name for mark in runs["twice"].parent.glob("died-*")} == {"died-back", "died-later"}
    expected, found = (keras.models.load_model(each / "export" / "model.keras").get_weights() for each in runs.values())
    assert [w.tobytes() for w in found] == [w.tobytes() for w in expected]
    assert len({(each / "rollbacks.json").read_text() for each in runs.values()}) == 1
    starts = [json.loads((each / "result.json").read_text())["starts"] for each in runs.values()]
    assert [len(each) for each in starts] == [1, 3]


def test_failures_without_a_checkpoint_in_between_end_the_run(tmp_path: pathlib.Path) -> None:
    def hopeless() -> tuple[np.ndarray, np.ndarray]:
        images, labels = poisoned_digits()
        images[3 * 64 :] = TOO_LARGE
        return images, labels

    failed = run(tmp_path, **(POISONED | {"train_data": hopeless}), may_fail=True)
    assert isinstance(failed.error, DivergedError) and failed.error.exit_status == 3
    assert "The run went back to step 0 3 times" in str(failed.error)
    assert not (tmp_path / "result.json").exists()


def test_without_the_policy_the_run_ends(tmp_path: pathlib.Path) -> None:
    failed = run(tmp_path, **(POISONED | {"on_divergence": None}), may_fail=True)
    assert isinstance(failed.error, DivergedError) and "Training diverged at step 4" in str(failed.error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_steps": -1}, "Rollback.skip_steps is -1; write a whole number from 0."),
        ({"rate": 2.0}, "Rollback.rate is 2.0; write a factor above 0, up to 1"),
        ({"skip_steps": 0}, "would do the same again"),
        ({"spike": 0}, "Rollback.spike is 0; write a z-score above 0"),
        ({"window": 2}, "Rollback.window is 2; write a whole number from 4."),
        ({"most_failures": 0}, "Rollback.most_failures is 0; write a whole number of at least 1."),
    ],
)
def test_a_mistake_is_one_message(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Rollback(**settings)
    assert message in str(caught.value)


def test_without_checkpoints_there_is_nowhere_to_go_back_to(tmp_path: pathlib.Path) -> None:
    failed = run(tmp_path, **(POISONED | {"checkpoint": "off"}), may_fail=True)
    assert isinstance(failed.error, UserError) and "train.checkpoint is 'off'" in str(failed.error)


SPIKING = POISONED | {"train_data": spiking_digits, "global_batch_size": 32, "epochs": 1}


@pytest.mark.slow
def test_a_spike_of_the_loss_is_left_out(tmp_path: pathlib.Path) -> None:
    policy = Rollback(spike=20.0, window=6)
    found = run(tmp_path / "spike", **(SPIKING | {"on_divergence": policy}))
    images, labels = spiking_digits()
    kept = np.r_[0 : 10 * 32, 11 * 32 : len(images)]
    without = {"train_data": lambda: (images[kept], labels[kept]), "on_divergence": None}
    assert found.bits() == run(tmp_path / "clean", **(SPIKING | without)).bits()
    failures = json.loads((tmp_path / "spike" / "rollbacks.json").read_text())
    assert [each["step"] for each in failures] == [11]
    assert "The loss of step 11 is far above those before it" in found.result.notes[0]
    quiet = run(tmp_path / "quiet", **(SPIKING | {"on_divergence": Rollback(spike=1e6, window=6)}))
    assert not (tmp_path / "quiet" / "rollbacks.json").exists() and quiet.bits() != found.bits()


@pytest.mark.slow
def test_where_calls_and_processes_end_does_not_change_what_is_a_spike(tmp_path: pathlib.Path) -> None:
    policy = {"on_divergence": Rollback(spike=20.0, window=6)}
    expected = run(tmp_path / "whole", **(SPIKING | policy), callbacks=[Raises(10**6)])
    for killed_after in (9, 13):
        cut = tmp_path / f"cut{killed_after}"
        with pytest.raises(KeyboardInterrupt):
            run(cut, **(SPIKING | policy), callbacks=[Raises(killed_after)])
        assert run(cut, **(SPIKING | policy), callbacks=[Raises(10**6)]).bits() == expected.bits()
