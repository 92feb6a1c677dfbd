"""A worker that loses another ends with one message and status 4; one that is told to leave takes the others along."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys

import pytest
import support
import tensorflow as tf
from processes import Running, running_workers

from tfdist.checkpoint import catalog
from tfdist.strategies.strategy import Topology
from tfdist.training.run.run import explain_collective

pytestmark = pytest.mark.slow

DIGITS = support.REPOSITORY / "configs" / "experiments" / "digits.gin"
DEADLINE_SECONDS = support.PATIENCE * 60
DIES = """
import contextlib
import json
import os
import signal
import threading

import keras


class DiesBetweenCalls(keras.callbacks.Callback):
    def __init__(self, killed):
        super().__init__()
        self.killed = killed

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        elif epoch == 2:
            next(thread for thread in threading.enumerate() if thread.name == "tfdist-deaths").join()
"""


def two_workers(
    run_dir: pathlib.Path, *params: str, directory: pathlib.Path = support.REPOSITORY
) -> contextlib.AbstractContextManager[list[Running]]:
    params = ("train.epochs = 100000", "train.xla = 'off'", *params)  # so long a run would try XLA
    flags = [f"--gin_file={DIGITS}", f"--run_dir={run_dir}", *(f"--gin_param={param}" for param in params)]
    return running_workers([[sys.executable, "-m", "tfdist.main", *flags]] * 2, run_dir.parent, directory=directory)


def has_points(path: pathlib.Path, count: int) -> bool:
    return path.exists() and path.read_text().count("\n") >= count


@pytest.mark.parametrize("killed", [0, 1])
def test_survivor_of_a_killed_worker_ends_with_status_4(tmp_path: pathlib.Path, killed: int) -> None:
    with two_workers(tmp_path / "run") as workers:
        workers[0].until(lambda: has_points(tmp_path / "run" / "metrics.jsonl", 6))
        workers[killed].signal(signal.SIGKILL)
        survivor = workers[1 - killed]
        assert survivor.end(timeout=DEADLINE_SECONDS) == 4, survivor.output
    assert "Traceback" not in survivor.output
    assert survivor.output.count("error:") == 1
    assert f"Worker {1 - killed} lost the connection" in survivor.output
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_dies_while_none_talks_to_it_is_missed(tmp_path: pathlib.Path, killed: int) -> None:
    """No connection breaks while it is used: the other waits for it, unless it has watched it die."""
    (tmp_path / "dies.py").write_text(DIES)
    params = (
        "import dies",
        "train.callbacks = [@dies.DiesBetweenCalls()]",
        f"dies.DiesBetweenCalls.killed = {killed}",
    )
    with two_workers(tmp_path / "run", *params, directory=tmp_path) as workers:
        survivor = workers[1 - killed]
        status, output = survivor.end(timeout=DEADLINE_SECONDS), survivor.output
        assert workers[killed].status == -signal.SIGKILL
    assert status == 4, output
    assert output.count("error:") == 1 and f"Worker {1 - killed} lost the connection" in output, output


def test_when_one_worker_is_told_to_leave_all_save_and_leave(tmp_path: pathlib.Path) -> None:
    """Although TensorFlow has a handler of its own for SIGTERM in workers."""
    with two_workers(tmp_path / "run") as workers:
        workers[0].until(lambda: has_points(tmp_path / "run" / "metrics.jsonl", 2))
        workers[1].signal(signal.SIGTERM)
        statuses = [worker.end(timeout=DEADLINE_SECONDS) for worker in workers]
        said = [worker.output for worker in workers]
    assert statuses == [143, 143], said
    assert "another worker has to leave" in said[0]
    assert "SIGTERM was received" in said[1]
    (newest,) = catalog.list_checkpoints(str(tmp_path / "run" / "checkpoints"))[-1:]
    assert catalog.verify(newest) is None
    assert all(f"Left at step {newest.step:,} after saving" in words for words in said)


MISFITS = (
    "Collective ops is aborted by: Shape mismatch in the collective instance 107. Op at … expected shape [8,12]",
    "Collective instance 135 expected type 0 and data_type 2 but got type 1 and data_type 1",
    "Mismatched allreduce tensor shapes: One rank sent a tensor of shape [8, 4], but another rank sent [8, 5].",
)
TIMED_OUT = "[unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete"  # the other was stopped


@pytest.mark.parametrize(
    ("kind", "said", "workers", "status", "words"),
    [
        *(("Internal", said, 2, 2, "do not run the same training") for said in MISFITS),
        ("InvalidArgument", "Mismatched labels: Invalid shape [3], expected float but got type int", 2, None, ""),
        ("Unknown", TIMED_OUT, 2, 4, ""),
        ("Unknown", TIMED_OUT, 1, None, ""),
    ],
)
def test_a_collective_that_fails_is_explained_in_tensorflows_horovods_and_gloos_words(
    kind: str, said: str, workers: int, status: int | None, words: str
) -> None:
    start = "" if kind == "InvalidArgument" else "Graph execution error:\n"
    error = getattr(tf.errors, f"{kind}Error")(None, None, start + said)
    found = explain_collective(error, Topology(0, workers, 1))
    assert (found and found.exit_status) == status and words in str(found)
