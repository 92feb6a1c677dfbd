"""A run stops, logs and evaluates at the steps that were asked for, however long its calls are; they grow to 0.1 s."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import (
    dense_model,
    digits,
    dropout_model,
    ema_sgd,
    sparse_loss,
    two_output_model,
    two_output_task,
    two_outputs,
)
from equivalence.runs import assert_same_bits
from training.trainings import STEPS_PER_EPOCH, Trained, run

from tfdist.errors import EXIT_DIVERGED, DivergedError, UserError
from tfdist.report.run_data import read_run
from tfdist.report.run_page import list_notes
from tfdist.training.loop.boundaries import Pace
from tfdist.training.recovery.rollback import Rollback


def evaluated_again(trained: Trained) -> dict[str, float]:
    """What Keras says of export/model.keras."""
    model = trained.exported()
    model.compile(loss=sparse_loss(), metrics=[keras.metrics.SparseCategoricalAccuracy()])
    return model.evaluate(*digits(101), verbose=0, return_dict=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "steps", "epochs"),
    [
        ({"epochs": 2, "steps": None}, 14, 2),
        ({"epochs": 3, "steps": 9}, 9, 1),
        ({"epochs": 1, "steps": 9}, 7, 1),
        ({"epochs": None, "steps": 37}, 37, 5),
        ({"epochs": None, "steps": 1}, 1, 0),
    ],
)
def test_a_run_ends_at_its_steps_or_epochs_whichever_comes_first(
    tmp_path: pathlib.Path, ends: dict[str, Any], steps: int, epochs: int
) -> None:
    trained = run(tmp_path, **ends)
    assert (trained.result.steps, trained.result.epochs) == (steps, epochs)
    assert trained.result.examples_seen == 64 * steps
    assert int(trained.optimizer.iterations) == steps
    ends_of_epochs = [*range(STEPS_PER_EPOCH, steps, STEPS_PER_EPOCH), steps]
    assert [p["step"] for p in trained.points("train")] == ends_of_epochs
    assert [p["epoch"] for p in trained.points("train")] == [*range(1, len(ends_of_epochs) + 1)]
    assert [p["step"] for p in trained.points("eval")] == ends_of_epochs
    assert trained.result.eval_metrics == pytest.approx(evaluated_again(trained), abs=1e-6)


@pytest.mark.slow
def test_evaluations_and_points_come_at_the_steps_asked_for(tmp_path: pathlib.Path) -> None:
    trained = run(tmp_path, epochs=None, steps=17, eval_every="5 steps", log_every_steps=3)
    assert [p["step"] for p in trained.points("eval")] == [5, 10, 15, 17]
    assert [p["step"] for p in trained.points("train")] == [3, 6, 7, 9, 12, 14, 15, 17]
    assert [p["epoch"] for p in trained.points("train")] == [1, 1, 1, 2, 2, 2, 3, 3]


@pytest.mark.slow
def test_weights_do_not_depend_on_the_length_of_calls(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"deterministic": True, "epochs": 4, "model": dropout_model, "num_microbatches": 2}
    settings |= {"eval_every": "10 steps", "train_data": lambda: digits(400)}
    first, *others = (run(tmp_path / str(steps), steps_per_call=steps, **settings) for steps in (1, 3, 7, None))
    for other in others:
        assert other.bits() == first.bits()
        assert [p["loss"] for p in other.points("eval")] == [p["loss"] for p in first.points("eval")]


def digits_with_nan() -> tf.data.Dataset:
    """In order, the 200th example is not a number: it is in the fourth batch."""
    images, labels = digits()
    images[200, 30] = np.nan
    return tf.data.Dataset.from_tensor_slices((images, labels))


IN_ORDER: dict[str, Any] = {"shuffle": False, "recovery": "off"}


@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_a_divergence_ends_the_run_at_its_step(tmp_path: pathlib.Path, steps_per_call: int) -> None:
    trained = run(tmp_path, train_data=digits_with_nan, may_fail=True, **IN_ORDER, steps_per_call=steps_per_call)
    assert isinstance(trained.error, DivergedError)
    assert trained.error.exit_status == EXIT_DIVERGED == 3
    assert "diverged at step 4" in str(trained.error)
    assert not (tmp_path / "result.json").exists()
    assert not (tmp_path / "export").exists()


@pytest.mark.slow
def test_the_kept_average_is_what_is_exported_and_evaluated(tmp_path: pathlib.Path) -> None:
    trained = run(tmp_path, optimizer=ema_sgd, epochs=2)
    assert trained.result.eval_metrics == pytest.approx(evaluated_again(trained), abs=1e-6)
    assert trained.points("eval")[-1]["loss"] != pytest.approx(trained.result.eval_metrics["loss"], abs=1e-3)
    (final,) = trained.points("final")
    assert (final["step"], final["epoch"]) == (2 * STEPS_PER_EPOCH, 2)
    assert trained.result.eval_metrics.items() <= final.items()


class WithUnused(keras.Model):
    """A layer of it takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = keras.layers.Dense(10, name="used"), keras.layers.Dense(3, name="idle")

    def build(self, shape: Any) -> None:
        self.used.build(shape)
        self.idle.build(shape)
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.used(x)


@pytest.mark.slow
def test_variables_that_the_loss_does_not_depend_on_are_told_once_and_stay(tmp_path: pathlib.Path) -> None:
    trained = run(tmp_path, model=WithUnused, epochs=3, optimizer=lambda: keras.optimizers.Adam(1e-3, use_ema=True))
    (event,) = trained.events("variables_unused")
    assert event["level"] == "warning"
    assert [path.rsplit("/", 2)[-2:] for path in event["details"]["variables"]] == [
        ["idle", "kernel"],
        ["idle", "bias"],
    ]
    assert trained.result.train_metrics["loss"] < trained.points("train")[0]["loss"]


@pytest.mark.slow
def test_no_bit_of_a_logged_loss_depends_on_where_calls_end(tmp_path: pathlib.Path) -> None:
    settings = {"task": two_output_task, "model": two_output_model, "train_data": two_outputs, "eval_data": None}
    points = [
        run(tmp_path / str(steps), steps_per_call=steps, **settings).points("train")
        for steps in (1, 3, STEPS_PER_EPOCH)
    ]
    assert points[0] == points[1] == points[2]
    assert {"loss", "digit_loss", "odd_loss"} < points[0][0].keys()


@pytest.mark.slow
def test_nothing_of_the_training_is_in_the_exported_model(tmp_path: pathlib.Path) -> None:
    trained = run(tmp_path, epochs=1, optimizer=lambda: keras.optimizers.Adam())
    assert not trained.exported().compiled and getattr(trained.exported(), "optimizer", None) is None
    bare = dense_model()
    bare.save(tmp_path / "bare.keras")
    assert (tmp_path / "export" / "model.keras").stat().st_size == pytest.approx(
        (tmp_path / "bare.keras").stat().st_size, abs=200
    )


@pytest.mark.slow
def test_a_run_that_stops_after_some_epochs_goes_on_to_the_same_end(tmp_path: pathlib.Path) -> None:
    def decaying() -> keras.optimizers.Optimizer:
        rate = keras.optimizers.schedules.CosineDecay(0.5, 3 * STEPS_PER_EPOCH)
        return keras.optimizers.SGD(rate, momentum=0.9)

    settings = {"epochs": 3, "optimizer": decaying, "model": dropout_model, "checkpoint": "auto", "deterministic": True}
    settings["steps_per_call"] = 2
    whole = run(tmp_path / "whole", **settings | {"steps_per_call": 3})
    for epochs in (1, 1, 2):
        part = run(tmp_path / "parts", stop_after_epochs=epochs, **settings)
        assert part.result is None and not (tmp_path / "parts/result.json").exists()
        assert [p["step"] for p in part.points("eval")] == [STEPS_PER_EPOCH * e for e in range(1, epochs + 1)]
    last = run(tmp_path / "parts", stop_after_epochs=3, **settings)
    assert last.result.steps == whole.result.steps and last.result.resumed_from_step == 2 * STEPS_PER_EPOCH
    assert last.points("eval") == whole.points("eval") and last.points("train") == whole.points("train")
    assert_same_bits(last.exported().get_weights(), whole.exported().get_weights())


@pytest.mark.parametrize("changes", [{"stop_after_epochs": 1}, {"recovery": Rollback()}])
def test_what_needs_checkpoints_is_refused_without(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"train\.{next(iter(changes))} = .* not work with train\.checkpoint = 'off'"):
        run(tmp_path, epochs=3, checkpoint="off", **changes)


@pytest.mark.slow
def test_the_targets_of_a_plan_in_the_run_directory_are_met_or_missed(tmp_path: pathlib.Path) -> None:
    targets = {"throughput": 1e12, "checkpoint_overhead": 0.999, "gpu_utilization": 0.8, "step_seconds": 1.0}
    (tmp_path / "plan.json").write_text(json.dumps({"performance_targets": targets}))
    found = run(tmp_path, epochs=1).result.performance_targets
    assert {name: each["met"] for name, each in found.items()} == {"throughput": False, "checkpoint_overhead": True}
    assert found["throughput"]["target"] == 1e12 and found["throughput"]["measured"] > 0
    notes = list_notes(read_run(str(tmp_path)))
    assert any(note.startswith("Target missed: throughput ") for note in notes)
    assert any(note.startswith("Target met: checkpoint_overhead ") for note in notes)


# The length of calls


class ClockOf:
    """As much of a strategy as agrees on the chief's time, which is so many times this worker's."""

    def __init__(self, chief: float = 1.0) -> None:
        self.chief, self.asked = chief, 0

    def from_chief(self, values: Sequence[float]) -> np.ndarray:
        self.asked += 1
        return np.array([self.chief * values[0]])


def observed(pace: Pace, step_seconds: float, calls: int = 30) -> list[int]:
    lengths = []
    for _ in range(calls):
        lengths.append(pace.steps_per_call)
        pace.observe(pace.steps_per_call, pace.steps_per_call * step_seconds)
    return lengths


@pytest.mark.parametrize(("chief", "step_seconds"), [(1.0, 0.004), (0.1, 0.04)], ids=["own", "chief's"])
def test_calls_double_until_they_take_long_enough_by_the_chiefs_clock(chief: float, step_seconds: float) -> None:
    strategy = ClockOf(chief)
    pace = Pace(strategy, None)
    assert observed(pace, step_seconds)[:7] == [1, 1, 2, 4, 8, 16, 16]
    assert pace.settled and pace.steps_per_call == 16
    assert strategy.asked == 5  # nothing is agreed on any more


def test_a_call_cut_short_by_a_boundary_tells_nothing() -> None:
    strategy = ClockOf()
    pace = Pace(strategy, None)
    observed(pace, 0.001, calls=4)
    length, asked = pace.steps_per_call, strategy.asked
    pace.observe(length - 1, 10.0)
    assert (pace.steps_per_call, strategy.asked, pace.settled) == (length, asked, False)
