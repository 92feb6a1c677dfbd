"""How a lost worker is noticed: one that is silent, and one whose process died.

TensorFlow's coordination service gives up a worker that was silent for the heartbeat timeout. It does not see that a
process died before that, and neither do the collectives unless a connection to it is in use at that moment: worker 0
waits until every worker has joined a collective, for ever. So worker 0 asks the others' servers every second; a server
that is gone refuses at once, while one of a stopped process only stays silent, which the timeout is for.

Invariant: the service is the one that `MultiWorkerMirroredStrategy` would set up, but for the heartbeat timeout, for
which TensorFlow has no public setting; `tests/strategies/test_liveness.py` fails when the strategy no longer takes it
as it finds it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.strategies.cluster.tf_config import Cluster

HEARTBEAT_SECONDS = 10.0  # TensorFlow's own default
LOCAL_HEARTBEAT_SECONDS = 3600.0
ASK_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # of a server that is there


def set_heartbeat_timeout(cluster: Cluster, seconds: float) -> None:
    """Has the workers of a cluster give one up that was silent for so long. Before a strategy is made.

    As `CollectiveAllReduceExtended._initialize_multi_worker` does, which leaves alone what was set up before it.
    """
    jobs = tf.compat.v1.ConfigProto().experimental.coordination_config.coordinated_job_list
    for job, workers in cluster.jobs.items():
        jobs.add(name=job, num_tasks=len(workers))
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{next(iter(cluster.jobs))}/replica:0/task:0",
        heartbeat_timeout_in_ms=round(seconds * 1000),
        coordinated_jobs=list(jobs),
    )


def watch_for_deaths(cluster: Cluster) -> None:
    """Has worker 0's collectives fail once the process of another worker is gone. After a strategy is made."""
    if cluster.worker_index != 0 or cluster.num_workers == 1:
        return
    _, *others = [
        f"/job:{job}/replica:0/task:{index}" for job, workers in cluster.jobs.items() for index in range(len(workers))
    ]
    stop = threading.Event()
    thread = threading.Thread(target=_ask_until_one_died, args=(others, stop), name="tfdist-deaths", daemon=True)
    thread.start()
    atexit.register(thread.join)  # TensorFlow must not end while it is asked
    atexit.register(stop.set)  # called first


def _ask_until_one_died(tasks: Sequence[str], stop: threading.Event) -> None:
    """As `CollectiveAllReduceExtended._check_health`, which is off beside a coordination service."""
    while not stop.wait(ASK_SECONDS):
        for task in tasks:
            try:
                context.context().check_collective_ops_peer_health(task, timeout_in_ms=round(ANSWER_SECONDS * 1000))
            except tf.errors.DeadlineExceededError:
                pass  # stopped, or behind a slow network: the heartbeat timeout decides
            except (tf.errors.UnavailableError, tf.errors.FailedPreconditionError) as error:
                context.context().abort_collective_ops(tf.errors.UNAVAILABLE, f"{task} is gone: {error.message}")
                return
            if stop.is_set():
                return
