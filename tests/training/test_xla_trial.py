"""XLA computes the same. Trials of `train.xla = "auto"` are calls of the training, and what they choose stays."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import pytest
import support
import tensorflow as tf
from equivalence.cases import CASES, attentive_model, clipped_adam, digits, linear_model
from equivalence.runs import load_weights
from tensorflow.python.autograph.core import ag_ctx
from training import xla_trials
from training.trainings import Trained, differ, run, softmax_model

from tfdist.errors import DivergedError
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry import heartbeat
from tfdist.training.run import assembly, tuned
from tfdist.training.step.optimizer import Update


def chosen(trained: Trained) -> dict[str, Any]:
    """What was tried; it is the choice that the run directory keeps."""
    (event,) = trained.events("xla_chosen")
    stored = json.loads((trained.directory / "tuned.json").read_text())
    assert stored == {"xla": event["details"]["choice"], "seconds_per_step": event["details"]["seconds"]}
    quickest = min(stored["seconds_per_step"], key=stored["seconds_per_step"].get)
    assert stored["xla"] in (quickest, "off")
    return stored


def whole(directory: pathlib.Path, **changes: Any) -> Trained:
    return run(directory, **xla_trials.SETTINGS | changes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of which XLA compiles nothing."""
    return whole(tmp_path_factory.mktemp("off"), xla="off")


@pytest.mark.slow
def test_a_trial_changes_nothing_but_who_computes(tmp_path: pathlib.Path, plain: Trained) -> None:
    with xla_trials.trials():
        tried = whole(tmp_path)
    assert set(chosen(tried)["seconds_per_step"]) == {"off", "loop", "on", "pass", "update"}
    assert differ(tried.weights(), plain.weights()) < 1e-5
    assert [p["step"] for p in tried.points("train")] == [p["step"] for p in plain.points("train")]
    assert tried.result.train_metrics == pytest.approx(plain.result.train_metrics, abs=1e-5)


@pytest.mark.slow
def test_a_call_that_compiles_counts_as_building(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher would take it for a hang otherwise."""
    phases: list[tuple[str, int | None]] = []
    monkeypatch.setattr(heartbeat, "beat", lambda phase, step=None: phases.append((phase, step)))
    with xla_trials.trials():
        whole(tmp_path)
    assert [step for phase, step in phases if phase == heartbeat.BUILDING and step is not None] == [2, 7, 8, 9]


@pytest.mark.slow
def test_a_run_that_fails_in_a_trial_tries_no_more(
    tmp_path: pathlib.Path, plain: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room for a variant")

    monkeypatch.setattr(assembly, "can_compile", fail)
    with xla_trials.trials():
        assert isinstance(whole(tmp_path, may_fail=True).error, MemoryError)
        again = whole(tmp_path)
    assert not again.events("xla_chosen") and again.bits() == plain.bits()


@pytest.mark.slow
def test_the_next_start_does_as_the_first_has_chosen(tmp_path: pathlib.Path, plain: Trained) -> None:
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / "tuned.json").write_text('{"xla": "on"}')
    with xla_trials.trials():
        again = whole(tmp_path / "auto")
    assert not again.events("xla_chosen")
    assert again.bits() == whole(tmp_path / "on", xla="on").bits() != plain.bits()


@pytest.mark.slow
def test_what_xla_cannot_compile_is_not_tried(tmp_path: pathlib.Path) -> None:
    with xla_trials.trials():
        tried = whole(tmp_path / "auto", model=xla_trials.interpreted_model)
    assert set(chosen(tried)["seconds_per_step"]) == {"off", "update"}
    assert differ(tried.weights(), whole(tmp_path / "off", model=linear_model, xla="off").weights()) < 1e-5


def test_an_update_that_xla_cannot_compile_is_known_without_running_it() -> None:
    class Printing(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(xla_trials.Interpreted()(gradient), variable, learning_rate)

    strategy = OneDevice()
    strategy.connect()
    variables = softmax_model().trainable_variables
    for optimizer, compiles in ((keras.optimizers.Adam(), True), (Printing(), False)):
        optimizer.build(variables)
        assert Update(strategy, optimizer, jit_compile=True).compiles(variables) is compiles
        assert int(optimizer.iterations) == 0


@pytest.mark.parametrize("changes", [{"deterministic": True}, {"sharding": "weights"}], ids=str)
def test_nothing_is_tried_where_it_could_not_be_used(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    with xla_trials.trials():
        assert not whole(tmp_path, epochs=1, **changes).events("xla_chosen")


@pytest.mark.parametrize(
    ("steps", "milliseconds", "tried", "choice"),
    [
        (300, {"on": 10}, [], None),  # one trace is expected to take 2 s, and 28 are left
        (1000, {"on": 50}, ["on", "pass"], "on"),
        (1000, {"on": 50, "pass": 20}, ["on", "pass"], "pass"),
        (1000, {"on": 99}, ["on"], "off"),  # what is left pays for no other, as this one gains nothing
        (9000, {"on": 99, "pass": 20}, ["on", "pass"], "pass"),
    ],
)
def test_the_likeliest_is_tried_first_and_the_others_if_that_pays(
    steps: int, milliseconds: dict[str, int], tried: list[str], choice: str | None
) -> None:
    strategy, made, settled = OneDevice(), [], []
    strategy.connect()
    variants: Any = {name: lambda name=name: made.append(name) or name for name in ("on", "pass")}
    trial = tuned.XlaTrial(strategy, "off", variants, steps, lambda *told: settled.append(told))  # type: ignore[arg-type]
    step = trial.observe(1, 1, 1.0)  # traces
    for number in range(2, 60):
        if not trial.is_over:
            step = trial.observe(number, 1, {"off": 100, **milliseconds}.get(str(step), 100) / 1000)
    assert made == tried
    assert [name for name, _ in settled] == ([] if choice is None else ["off", choice])


def test_a_short_run_tries_nothing(tmp_path: pathlib.Path) -> None:
    assert not whole(tmp_path).events("xla_chosen") and not (tmp_path / "tuned.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "tried"),
    [
        ("mirrored2", {"off", "pass"}),
        ("multi_worker", {"off", "pass", "update", "on"}),
        pytest.param("horovod", {"off", "pass", "update", "on"}, marks=pytest.mark.horovod),
    ],
)
def test_all_workers_try_alike(tmp_path: pathlib.Path, plain: Trained, strategy: str, tried: set[str]) -> None:
    launch = support.LAUNCH.get(strategy, ("--workers=1",))
    support.run_module("training.xla_trials", tmp_path / "run", strategy, launch=launch).check()
    assert set(chosen(Trained(tmp_path / "run"))["seconds_per_step"]) == tried
    assert differ(load_weights(tmp_path / "run"), plain.weights()) < 1e-5


DRAWING: dict[str, Any] = {"model": attentive_model, "optimizer": clipped_adam}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "modes"),
    [
        ({"num_microbatches": 3, "train_data": lambda: digits(301)}, ["pass"]),
        (CASES["two_outputs"], ["on"]),
        (CASES["large_embedding"], ["pass", "update", "on"]),
        (DRAWING, ["on"]),
        (DRAWING | {"num_microbatches": 2, "train_data": lambda: digits(501)}, ["pass"]),
    ],
    ids=["microbatches", "two_outputs", "embedding", "dropout", "dropout, microbatches"],
)
def test_xla_agrees_with_what_is_not_compiled(tmp_path: pathlib.Path, case: dict[str, Any], modes: list[str]) -> None:
    off, *compiled = (run(tmp_path / xla, **case | {"epochs": 1}, xla=xla) for xla in ["off", *modes])
    for each in compiled:
        assert differ(each.weights(), off.weights()) < 1e-5
        assert each.result.train_metrics == pytest.approx(off.result.train_metrics, abs=1e-5)


@pytest.mark.slow
def test_xla_agrees_on_two_replicas(mirrored: Callable[[str], Any]) -> None:
    assert differ(mirrored("xla_on"), mirrored("xla_off")) < 1e-5
    assert differ(mirrored("xla_on_microbatches"), mirrored("xla_off_microbatches")) < 1e-5
    assert "takes its statistics over all replicas. Write train.xla = 'update' or 'auto'" in mirrored("xla_batch_norm")


@pytest.mark.parametrize("xla", ["off", "pass"])
def test_code_is_taken_as_it_is_written(tmp_path: pathlib.Path, xla: str) -> None:
    """AutoGraph would rewrite Python's `if` and `for` of a task, as Keras's `fit` does not, and takes seconds."""
    seen = []

    class Recording(Supervised):
        def terms(self, *given: Any, **named: Any) -> Any:
            seen.append(ag_ctx.control_status_ctx().status)
            return super().terms(*given, **named)

    task = Recording(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    run(tmp_path, task=lambda: task, xla=xla, epochs=1, eval_data=None)
    assert seen and ag_ctx.Status.ENABLED not in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"train_data": lambda: digits(301)},  # a smaller last batch
        {"steps_per_call": 4, "train_data": lambda: digits(301)},  # the last call has the smaller batch alone
        DRAWING,
        {"precision": "float16"},
        {"log_gradient_norm": True, "drop_remainder": True, "train_data": lambda: digits(301)},
    ],
    ids=["smaller batch", "calls of four steps", "dropout", "float16", "norm"],
)
def test_steps_of_one_program_are_those_of_many(tmp_path: pathlib.Path, case: dict[str, Any]) -> None:
    settings = case | {"epochs": 2, "eval_data": None}
    on, loop = (run(tmp_path / xla, **settings, xla=xla) for xla in ("on", "loop"))
    assert differ(loop.weights(), on.weights()) < 5e-6
    for one, other in zip(loop.points("train"), on.points("train"), strict=True):
        for name in ("step", "loss", "sparse_categorical_accuracy"):
            assert one[name] == pytest.approx(other[name], abs=1e-6)


@pytest.mark.slow
def test_a_run_says_where_steps_cannot_be_in_one_program(tmp_path: pathlib.Path) -> None:
    stream = tf.data.Dataset.from_tensor_slices(digits(64))
    ended = run(tmp_path, xla="loop", train_data=lambda: stream, epochs=1, eval_data=None)
    (note,) = ended.result.notes
    assert note.startswith("train.xla = 'loop' acts as 'on'")
    assert [event["details"]["message"] for event in ended.events("single_steps")] == [note]


@pytest.mark.slow
def test_steps_of_one_program_resume(tmp_path: pathlib.Path) -> None:
    settings = DRAWING | {"xla": "loop", "eval_data": None, "epochs": 2}
    whole_run = run(tmp_path / "whole", **settings)
    run(tmp_path / "parts", **settings | {"stop_after_epochs": 1})
    assert run(tmp_path / "parts", **settings).bits() == whole_run.bits()


@pytest.mark.slow
def test_a_program_ends_at_a_step_that_is_not_finite(tmp_path: pathlib.Path) -> None:
    settings = {"optimizer": lambda: keras.optimizers.SGD(3e38), "recovery": "off", "may_fail": True}
    on, loop = (run(tmp_path / xla, xla=xla, **settings) for xla in ("on", "loop"))
    assert isinstance(loop.error, DivergedError)
    assert str(loop.error) == str(on.error)
