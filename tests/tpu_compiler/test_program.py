"""The step that the TPU compiler gets computes what the step of one device does: run by XLA, as one replica."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence.cases import BASE, classification, dense_model, weighted_digits
from equivalence.runs import assert_close

from tfdist.keras_patches.patches import Patches
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.strategies.tpu import TpuProgram
from tfdist.telemetry.console.progress_bar import open_console
from tfdist.training.run import assembly
from tfdist.training.run.request import Request
from tfdist.training.run.run import open_run
from tfdist.training.run.train_settings import TrainSettings

pytestmark = pytest.mark.slow


def settings(strategy: Strategy) -> TrainSettings:
    averaged = {"use_ema": True, "ema_overwrite_frequency": 3}
    changes = {
        "model": functools.partial(dense_model, batch_norm=True),
        "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5, **averaged),
        "task": classification(),
        "train_data": weighted_digits,
        "deterministic": False,
    }
    return TrainSettings(**BASE | changes, strategy=strategy, checkpoint="off")


def weights_after_some_steps(
    strategy: Strategy, compiled: Callable[[Callable[[Any], Any]], Callable[[Any], Any]], directory: Path
) -> tuple[list[np.ndarray], list[float]]:
    """What five steps come to, each by a call of `compiled(step)`."""
    own = settings(strategy)
    request = Request(str(directory), console=lambda is_chief: open_console(is_chief=False), keeps=False)
    with open_run(request, strategy, mode="train") as run, Patches() as patches:
        training = assembly.assemble(run, own, own.model, patches)
        step = assembly.build_step(training)
        advance = compiled(lambda batch: step.on_batch(batch).loss)
        batches = assembly.stream(run, training.source, training.plan)
        losses = [float(advance(next(batches))) for _ in range(5)]
        return [np.array(each) for each in training.learner.model.get_weights()], losses


def test_one_program_does_what_the_step_of_one_device_does(tmp_path: Path) -> None:
    plain = weights_after_some_steps(OneDevice(), lambda f: tf.function(f, autograph=False), tmp_path / "one")

    def by_xla(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return tf.function(function, autograph=False, jit_compile=True)

    program = weights_after_some_steps(TpuProgram(1), by_xla, tmp_path / "program")
    assert_close(program[0], plain[0], tolerance=1e-5)
    np.testing.assert_allclose(program[1], plain[1], rtol=0, atol=1e-5)
    assert plain[1][0] - plain[1][-1] > 0.1
