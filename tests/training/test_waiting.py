"""A worker that is slower than the others is named while it is, and so is an input that a training waits for."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import numpy as np
import pytest
import support
import tensorflow as tf
from equivalence.cases import digits
from training.trainings import Trained, run

from tfdist.data.sources.source import Order, Reader, Source, permute
from tfdist.training.watch import waiting

SLOW_SECONDS = 0.4  # that a busy machine does not make the other worker seem slow too
MODULE = f"""\
import json, os, time
import numpy as np
import tensorflow as tf
from tfdist.data.sources.arrays import ArraySource

class UnevenSource(ArraySource):
    def __init__(self):
        super().__init__((np.ones((64, 8, 8, 1), np.float32), np.zeros(64, np.int32)))

    def gatherer(self):
        is_slow = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1

        def rows(indices):
            time.sleep({SLOW_SECONDS} if is_slow else 0.0)
            return [np.ones((len(indices), 8, 8, 1), np.float32), np.zeros(len(indices), np.int32)]

        def gather(indices):
            found = tf.numpy_function(rows, [indices], [spec.dtype for spec in self.structure])
            return tuple(tf.ensure_shape(f, spec.shape) for f, spec in zip(found, self.structure, strict=True))

        return gather
"""


@pytest.mark.slow
def test_a_slow_worker_is_named_and_the_others_are_told_to_be_idle(tmp_path: pathlib.Path) -> None:
    (tmp_path / "uneven.py").write_text(MODULE)
    settings = ["import uneven", "train.train_data = @uneven.UnevenSource", "train.eval_data = None"]
    settings += ["train.steps = 25", "train.epochs = None", "train.steps_per_call = 1", "train.global_batch_size = 16"]
    finished = support.run_python(
        [
            *("-m", "tfdist.launch", "--workers=2", "--"),
            f"--gin_file={support.REPOSITORY / 'configs/experiments/digits.gin'}",
            *(f"--gin_param={setting}" for setting in settings),
            f"--run_dir={tmp_path / 'run'}",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{support.REPOSITORY}:{tmp_path}"},
    ).check()
    trained = Trained(tmp_path / "run")
    (named,) = trained.events("straggler")
    assert named["details"]["slow_worker"] == 1
    assert named["step"] < 25  # while it happens
    assert "worker 1 holds up the others" in finished.stderr
    (told,) = [event["details"] for event in trained.events("workers")]
    quick, slow = told["step_seconds"]
    assert quick < SLOW_SECONDS / 2 < slow
    assert told["input_share"][0] < 0.3 < 0.5 < told["input_share"][1]
    assert told["idle_share"][1] < 0.3 < 0.5 < told["idle_share"][0]
    assert "worker 1: " in finished.stdout


# For input


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
def test_a_run_that_does_not_wait_is_not_warned_and_a_deterministic_one_of_the_process_not_measured(
    tmp_path: pathlib.Path,
) -> None:
    deterministic = run(tmp_path / "deterministic", deterministic=True, epochs=2, eval_data=None)
    assert not deterministic.events("input_wait") and deterministic.result.steps == 14
    trained = run(tmp_path / "next", epochs=3, steps_per_call=1)
    told = trained.events("input_wait")
    assert [event["details"]["epoch"] for event in told] == [1, 2, 3]
    assert all(0 <= event["details"]["share"] < 1 and "message" not in event["details"] for event in told)
    assert not trained.events("input_bound")
