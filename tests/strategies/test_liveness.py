"""For how long TensorFlow waits for a worker that is silent."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest
from launch.programs import Run

from tfdist.strategies.cluster.tf_config import read_tf_config
from tfdist.strategies.multi_worker import HEARTBEAT_SECONDS, LOCAL_HEARTBEAT_SECONDS, MultiWorker

STOPS = """
from tfdist.strategies.multi_worker import MultiWorker
strategy = MultiWorker(implementation="ring")
strategy.connect()
strategy.any_worker(False)
for length in (2, 3):  # so that TensorFlow traces it for any length
    strategy.sum_over_workers([1.0] * length)
for stopped in (0, 1):
    mark(f"met{stopped}-{index}")
    if index == stopped:
        wait_for(f"may_go_on{stopped}")
    print("any", strategy.any_worker(index == 1), flush=True)
"""


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1:1", "127.0.0.1:2"], LOCAL_HEARTBEAT_SECONDS),
        (["localhost:1", "[::1]:2"], LOCAL_HEARTBEAT_SECONDS),
        (["127.0.0.1:1", "10.0.0.2:2"], HEARTBEAT_SECONDS),
        (["host0:1", "host1:2"], HEARTBEAT_SECONDS),
    ],
)
def test_between_machines_silence_is_a_loss_sooner_than_on_one(addresses: list[str], expected: float) -> None:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    cluster = read_tf_config({"TF_CONFIG": json.dumps(config)})
    assert MultiWorker()._heartbeat_seconds(cluster) == expected
    assert MultiWorker(heartbeat_timeout_seconds=60)._heartbeat_seconds(cluster) == 60.0


@pytest.mark.slow
def test_a_stopped_worker_without_restarts_goes_on_with_the_others(launch: Callable[..., Run]) -> None:
    run = launch(STOPS)
    for stopped in (0, 1):  # worker 0 leads the service
        run.wait_for(f"met{stopped}-0", f"met{stopped}-1")
        pid = run.read_pid(f"pid{stopped}")
        os.kill(pid, signal.SIGSTOP)
        (run.directory / f"may_go_on{stopped}").touch()
        time.sleep(HEARTBEAT_SECONDS + 5)  # longer than TensorFlow's own timeout
        os.kill(pid, signal.SIGCONT)
    status, stdout, stderr = run.finish()
    assert (status, sorted(stdout)) == (0, ["[worker 0] any True"] * 2 + ["[worker 1] any True"] * 2), stderr
    assert not [line for line in stderr if "WARNING:tensorflow" in line]
