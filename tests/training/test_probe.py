"""XLA computes the same, and code is taken as it is written."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import pytest
from equivalence.cases import CASES, digits
from tensorflow.python.autograph.core import ag_ctx
from training.checks import differ
from training.trainings import run

from tfdist.tasks.supervised import Supervised

EMBEDDING = CASES["large_embedding"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "xla"),
    [
        ({"num_microbatches": 3, "train_data": lambda: digits(301)}, "pass"),
        (CASES["two_outputs"], "on"),
        *[(EMBEDDING, "pass"), (EMBEDDING, "update"), (EMBEDDING, "on")],
    ],
    ids=["microbatches", "two_outputs", "embedding, pass", "embedding, update", "embedding, on"],
)
def test_xla_agrees_with_what_is_not_compiled(tmp_path: pathlib.Path, case: dict[str, Any], xla: str) -> None:
    settings = case | {"epochs": 1}
    plain, compiled = run(tmp_path / "off", **settings, xla="off"), run(tmp_path / "on", **settings, xla=xla)
    assert differ(compiled.weights(), plain.weights()) < 1e-5
    assert compiled.result.train_metrics == pytest.approx(plain.result.train_metrics, abs=1e-5)


@pytest.mark.slow
def test_xla_agrees_on_two_replicas(mirrored: Callable[[str], Any]) -> None:
    assert differ(mirrored("xla_on"), mirrored("xla_off")) < 1e-5
    assert differ(mirrored("xla_on_microbatches"), mirrored("xla_off_microbatches")) < 1e-5


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
