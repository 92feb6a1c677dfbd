"""A worker that is slower than the others is named while it is, and the end tells what each did with its time."""

from __future__ import annotations

import json
import pathlib

import pytest
import support

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
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (named,) = [event for event in events if event["event"] == "straggler"]
    assert named["details"]["slow_worker"] == 1
    assert named["step"] < 25  # while it happens
    assert "worker 1 holds up the others" in finished.stderr
    (told,) = [event["details"] for event in events if event["event"] == "workers"]
    quick, slow = told["step_seconds"]
    assert quick < SLOW_SECONDS / 2 < slow
    assert told["input_share"][0] < 0.3 < 0.5 < told["input_share"][1]
    assert told["idle_share"][1] < 0.3 < 0.5 < told["idle_share"][0]
    assert "worker 1: " in finished.stdout
