"""For how long TensorFlow waits for a silent worker: its coordination service, set up before a strategy does it.

Invariant: the service is the one that `MultiWorkerMirroredStrategy` would set up, but for the heartbeat timeout, for
which TensorFlow has no public setting; `tests/strategies/test_heartbeat.py` fails when the strategy no longer takes it
as it finds it.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

from tfdist.strategies.cluster import Cluster

HEARTBEAT_SECONDS = 10.0  # TensorFlow's own default
LOCAL_HEARTBEAT_SECONDS = 3600.0


def set_heartbeat_timeout(cluster: Cluster, seconds: float) -> None:
    """Has the workers of a cluster give one up that was silent for so long. Before a strategy is made.

    As `CollectiveAllReduceExtended._initialize_multi_worker` does, which leaves alone what was set up before it.
    """
    spec = tf.train.ClusterSpec(cluster.jobs)
    jobs = [CoordinatedJob(name=job, num_tasks=spec.num_tasks(job)) for job in spec.jobs]
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(spec),
        heartbeat_timeout_in_ms=round(seconds * 1000),
        coordinated_jobs=jobs,
    )
