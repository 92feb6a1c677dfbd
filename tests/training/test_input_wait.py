"""A training says how long it waited for its input, and once what would help."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import digits
from training.trainings import run

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline
from tfdist.data.sources.source import Order, Reader, Source, permute
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Topology
from tfdist.training.watch import waiting
from tfdist.training.watch.waiting import WaitTimes, timed_next


class Slow(Source):
    """The digits, of which each batch takes so many seconds to read, one at a time."""

    calls_python = False  # the pipeline reads it inline, without other threads

    def __init__(self, seconds: float) -> None:
        self._arrays = digits()
        self._seconds = seconds
        self.num_examples = len(self._arrays[0])
        self.structure = tuple(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in self._arrays)

    def reader(self, order: Order) -> Reader:
        def rows(indices: np.ndarray) -> list[np.ndarray]:
            time.sleep(self._seconds)
            return [array[indices] for array in self._arrays]

        def gather(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            indices = permute(positions, epoch, num_examples=self.num_examples, seed=order.seed)
            found = tf.numpy_function(rows, [indices], [spec.dtype for spec in self.structure])
            return tuple(tf.ensure_shape(f, spec.shape) for f, spec in zip(found, self.structure, strict=True))

        return gather


class Recorder:
    """Takes the events of `WaitTimes`: the step and the details."""

    def __init__(self) -> None:
        self.epochs: list[tuple[int, dict[str, Any]]] = []
        self.warnings: list[tuple[int, dict[str, Any]]] = []

    def info(self, event: str, *, step: int, **details: Any) -> None:
        assert event == "input_wait"
        self.epochs.append((step, details))

    def warning(self, event: str, *, step: int, **details: Any) -> None:
        assert event == "input_bound"
        self.warnings.append((step, details))


# Steps that compute a while with a batch that is there, on the only thread that the process has for operations.


@pytest.mark.slow
def test_what_is_measured_is_the_time_the_pipeline_took() -> None:
    strategy = OneDevice()
    strategy.connect()
    source = Slow(0.05)
    plan = BatchPlan(num_examples=source.num_examples, global_batch_size=8, num_replicas=1)
    iterator = strategy.distribute(lambda topology: build_pipeline(source, plan, topology))

    @tf.function
    def waits(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        def step(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            batch, waited = timed_next(strategy, iterator)
            with tf.control_dependencies(tf.nest.flatten(batch)):
                return i + 1, total + waited

        return tf.while_loop(lambda i, _: i < steps, step, [0, tf.constant(0.0, tf.float64)], parallel_iterations=1)[1]

    waits(iterator, tf.constant(20))  # empties what was read ahead while it was traced
    started = time.perf_counter()
    waited = float(waits(iterator, tf.constant(10)))
    took = time.perf_counter() - started
    assert 0.45 < waited <= took + 0.001  # ten batches of 0.05 s, the first of which may be under way


@pytest.mark.slow
def test_a_run_that_waits_tells_each_epochs_share_and_warns_once_with_the_cure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "WARNED_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "SHOWN_SECONDS", 0.1)
    trained = run(tmp_path, train_data=lambda: Slow(0.05), eval_data=None, epochs=4, steps_per_call=2)
    told = trained.events("input_wait")
    assert [event["details"]["epoch"] for event in told] == [1, 2, 3, 4]
    assert all(0.5 < event["details"]["share"] <= 1 for event in told[2:])
    (warning,) = trained.events("input_bound")
    assert warning["level"] == "warning" and "array_files.ArrayFiles" in warning["details"]["message"]
    said = capfd.readouterr()
    assert "% of the time" in said.err and "array_files.ArrayFiles" in said.err
    assert "epoch 4: waited for input" in said.out
    assert not any("input" in name for name in trained.points("train")[0])


@pytest.mark.slow
def test_a_run_that_does_not_wait_is_not_warned(tmp_path: pathlib.Path) -> None:
    trained = run(tmp_path, epochs=3, steps_per_call=1)
    told = trained.events("input_wait")
    assert [event["details"]["epoch"] for event in told] == [1, 2, 3]
    assert all(0 <= event["details"]["share"] < 1 and "message" not in event["details"] for event in told)
    assert not trained.events("input_bound")


@pytest.mark.slow
def test_a_deterministic_run_is_not_measured_and_the_next_of_the_process_is(tmp_path: pathlib.Path) -> None:
    deterministic = run(tmp_path / "deterministic", deterministic=True, epochs=2, eval_data=None)
    assert not deterministic.events("input_wait") and deterministic.result.steps == 14
    assert run(tmp_path / "next", epochs=2, eval_data=None).events("input_wait")


def test_the_first_call_does_not_count_and_the_worker_that_waited_most_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(OneDevice):
        """As worker 0 of two sees it, the other of which waited three times as long."""

        def sum_over_workers(self, values: Any) -> np.ndarray:
            own = np.asarray(values).reshape(2, 4)
            return (own + own[::-1] * [3, 1, 3, 1]).ravel()

    strategy, recorder = Two(), Recorder()
    monkeypatch.setattr(Two, "topology", Topology(0, 2, 1))
    waits = WaitTimes(strategy, recorder, hint="Hint.")
    call = {"steps": 1, "peer_seconds": 0.0, "news": []}
    waits.observe(step=1, input_seconds=50.0, seconds=60.0, **call)
    waits.end_epoch(step=1, epoch=0)
    assert not recorder.epochs
    waits.observe(step=2, input_seconds=1.0, seconds=10.0, **call)
    waits.end_epoch(step=2, epoch=1)
    text, figures = "worker 1 waited for input 30% of the time (3.0 s)", {"share": 0.3, "seconds": 3.0}
    ((step, waited),) = recorder.epochs
    assert (step, waited.pop("epoch"), waited.pop("message")) == (2, 2, f"epoch 2: {text}")
    assert waited.pop("by_worker") == pytest.approx([0.1, 0.3]) and waited == pytest.approx(figures)
    ((step, warned),) = recorder.warnings
    assert (step, warned.pop("message")) == (2, f"Training: {text}. Hint.")
    assert warned.pop("by_worker") == pytest.approx([0.1, 0.3]) and warned == pytest.approx(figures)
