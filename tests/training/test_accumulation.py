"""A run that continues with fewer workers computes its batches in more slices."""

from __future__ import annotations

import types
from typing import Any

import keras
import pytest

from tfdist.data.order.batches import BatchPlan
from tfdist.strategies.cluster.environment import ALL_WORKERS_VARIABLE
from tfdist.training.run.assembly import scale_microbatches


class Events:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def info(self, event: str, *, message: str, **_: Any) -> None:
        assert event == "fewer_workers"
        self.messages.append(message)


def slices_of(layer: keras.layers.Layer, *, workers: int, slices: int = 1, batch: int = 64) -> tuple[int, list[str]]:
    """The microbatches with so many workers, and what is said of them."""
    events = Events()
    topology = types.SimpleNamespace(num_workers=workers)
    run: Any = types.SimpleNamespace(topology=topology, events=events)
    learner: Any = types.SimpleNamespace(model=keras.Sequential([keras.Input((4,)), layer]))
    plan = BatchPlan(num_examples=640, global_batch_size=batch, num_replicas=workers, num_microbatches=slices)
    made = scale_microbatches(run, learner, plan)
    assert made.global_batch_size == batch and made.num_replicas == workers
    return made.num_microbatches, events.messages


def test_slices_are_no_larger_than_with_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slices_of(keras.layers.Dense(1), workers=2) == (1, [])
    monkeypatch.setenv(ALL_WORKERS_VARIABLE, "3")
    assert slices_of(keras.layers.Dense(1), workers=3) == (1, [])
    slices, messages = slices_of(keras.layers.Dense(1), workers=2)
    assert slices == 2 and messages == [
        "2 of 3 workers train; each computes its part of a batch in 2 slices in place of 1."
    ]
    assert slices_of(keras.layers.Dense(1), workers=1, slices=4)[0] == 12


@pytest.mark.slow
def test_a_model_that_takes_statistics_of_a_slice_keeps_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALL_WORKERS_VARIABLE, "3")
    slices, (message,) = slices_of(keras.layers.BatchNormalization(name="norm"), workers=2)
    assert slices == 1 and "takes statistics of them (norm)" in message
    slices, (message,) = slices_of(keras.layers.Dense(1), workers=2, batch=3)
    assert slices == 1 and "the batch is too small" in message
