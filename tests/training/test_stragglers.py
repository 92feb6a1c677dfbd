"""A worker that is slower than the others is named while it is, and the end tells what each did with its time."""

from __future__ import annotations

import json
import pathlib

import pytest
import support

from tfdist.strategies.base import Topology
from tfdist.training.watch.waiting import SLOW_CALLS, Stragglers, WorkerTimes

pytestmark = pytest.mark.slow

SLOW_SECONDS = 0.4  # that a busy machine does not make the other worker seem slow too
MODULE = f"""\
import json, os, time
import numpy as np
import tensorflow as tf
from tfdist.data.sources.source import RandomAccessSource

class UnevenSource(RandomAccessSource):
    calls_python = False

    def __init__(self):
        self.num_examples = 64
        self.structure = (tf.TensorSpec([None, 8, 8, 1], tf.float32), tf.TensorSpec([None], tf.int32))

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


class Recorder:
    """Takes what is reported."""

    def __init__(self) -> None:
        self.named: list[tuple[int, int]] = []

    def straggler(self, *, step: int, worker: int, seconds: float, median: float) -> None:
        assert seconds > 1.5 * median
        self.named.append((step, worker))

    def workers(self, *, step: int, times: list[WorkerTimes]) -> None: ...


class FourWorkers:
    """As much of a strategy as the comparison needs."""

    topology = Topology(0, 4, 1)


def test_who_is_slow_most_of_a_while_is_named_and_again_after_being_quick_for_one() -> None:
    recorder = Recorder()
    stragglers = Stragglers(FourWorkers(), recorder)

    def calls(count: int, first: int, *own: float) -> None:
        for step in range(first, first + count):
            stragglers.observe(step=step, steps=1, seconds=2.0, input_seconds=0.0, peer_seconds=1.0, news=list(own))

    calls(5, 0, 0.0, 0.0, 0.0, 0.0)  # nothing is known yet
    calls(3, 10, 1.0, 1.1, 1.4, 0.9)
    calls(2, 20, 1.0, 1.1, 1.6, 0.9)
    assert not recorder.named
    calls(1, 30, 1.0, 1.1, 1.6, 0.9)  # the third of the last five
    calls(1, 31, 1.0, 1.1, 1.2, 0.9)
    calls(2 * SLOW_CALLS, 40, 1.0, 1.1, 1.7, 0.9)
    assert recorder.named == [(30, 2)]
    calls(SLOW_CALLS, 60, 1.0, 1.1, 1.2, 0.9)
    calls(SLOW_CALLS, 70, 9.0, 1.1, 1.7, 0.9)
    assert recorder.named == [(30, 2), (72, 0), (72, 2)]
    assert stragglers.news() == [1.0, 0.0, 0.0, 0.0]


def test_short_calls_count_together_so_that_a_quick_one_among_them_is_no_break() -> None:
    recorder = Recorder()
    stragglers = Stragglers(FourWorkers(), recorder)
    for step in range(200):
        own = [1.0, 1.0, 1.0 if step % 4 == 0 else 3.0, 1.0]
        stragglers.observe(step=step, steps=1, seconds=1 / 16, input_seconds=0.0, peer_seconds=0.01, news=own)
    assert recorder.named == [(47, 2)]  # after 3 s


def test_one_long_hiccup_is_not_told_and_a_worker_that_stalls_again_and_again_is() -> None:
    for slow, expected in [((10,), []), ((10, 12, 13, 15, 16, 18), [(13, 2)])]:
        recorder = Recorder()
        stragglers = Stragglers(FourWorkers(), recorder)
        for step in range(20):
            seconds = 4.0 if slow == (10,) and step == 10 else 0.6
            own = [1.0, 1.0, 5.0 if step in slow else 1.0, 1.0]
            stragglers.observe(step=step, steps=1, seconds=seconds, input_seconds=0.0, peer_seconds=0.01, news=own)
        assert recorder.named == expected
