"""Many machines through `tf.distribute.MultiWorkerMirroredStrategy`, described by TF_CONFIG.

A lost worker is noticed in two ways. TensorFlow's coordination service gives up a worker that was silent for the
heartbeat timeout, for which there is no public setting. It does not see before that a process died, and neither do the
collectives unless a connection to it is in use: a call that begins later waits for it to come back. So worker 0 asks
the others' servers every second, and they ask worker 0's, whose end follows any other's. A server that is gone refuses
at once, one of a stopped process stays silent.
`tests/strategies/test_liveness.py` fails when the strategy no longer takes the service as it finds it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.errors import UserError, build_user_error
from tfdist.keras_patches.patches import Patches
from tfdist.settings.checks import SECONDS, one_of, whole_number
from tfdist.strategies import failure_report
from tfdist.strategies.cluster import environment
from tfdist.strategies.cluster.rendezvous import AddressTakenError, rendezvous
from tfdist.strategies.cluster.tf_config import EXAMPLE, Cluster, read_tf_config, split_address
from tfdist.strategies.failure_report import FailureReport
from tfdist.strategies.strategy import MakeDataset, Notify, Strategy, Topology, static_replica_index, with_device
from tfdist.strategies.sums import pack_indices
from tfdist.telemetry import heartbeat

DEFAULT_PACKING = 2**21  # bytes
THREADS_ON_ONE_CORE = 3
IMPLEMENTATIONS = ("auto", "ring", "nccl")
SENT_AS = {tf.int8: tf.int32, tf.uint8: tf.int32, tf.bfloat16: tf.float32}  # first values that no collective sends


class MultiWorker(Strategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` over the cluster that TF_CONFIG describes.

    Args:
      implementation: the collectives: "ring" (gRPC), "nccl" (GPUs), or "auto", which lets TensorFlow choose.
      bytes_per_pack: how many bytes of gradients go into one collective. Small packs leave while the backward pass
        still computes, large ones pay less per message. 0 packs everything into one.
      peer_timeout_seconds: how long to wait for the other workers at the start.
      heartbeat_timeout_seconds: for how long a worker may be silent (stopped, suspended, cut off) before the others
        give the run up; a process that dies is noticed at once. "auto" is 10 s between machines. On one machine, where
        only a stopped process is silent, it is an hour.
    """

    name = "multi_worker"

    def __init__(
        self,
        implementation: str = "auto",
        bytes_per_pack: int = DEFAULT_PACKING,
        peer_timeout_seconds: float = 600.0,
        heartbeat_timeout_seconds: float | str = "auto",
    ) -> None:
        super().__init__()
        one_of(*IMPLEMENTATIONS)("MultiWorker.implementation", implementation)
        whole_number(0)("MultiWorker.bytes_per_pack", bytes_per_pack)
        SECONDS("MultiWorker.peer_timeout_seconds", peer_timeout_seconds)
        if heartbeat_timeout_seconds != "auto":
            SECONDS("MultiWorker.heartbeat_timeout_seconds", heartbeat_timeout_seconds)
        self.implementation = implementation
        self.bytes_per_pack = bytes_per_pack
        self.peer_timeout_seconds = peer_timeout_seconds
        self.heartbeat_timeout_seconds = heartbeat_timeout_seconds

    def expected_replicas(self) -> int | None:
        return self._cluster().num_workers * max(1, len(tf.config.list_physical_devices("GPU")))

    def distribute(self, make: MakeDataset) -> Iterator[Any]:
        devices = self.distribution.extended.worker_devices
        if len(devices) == 1 and "CPU" in devices[0]:
            # Nothing to bring to another device: TensorFlow's own iterator costs 0.1 ms a step.
            return iter(make(self.topology))
        return super().distribute(make)

    def _sum_of_one_type(self, tensors: list[tf.Tensor]) -> Sequence[tf.Tensor]:
        sizes = [t.dtype.size * (t.shape.num_elements() or 0) for t in tensors]
        are_known = all(t.shape.is_fully_defined() for t in tensors)
        replica, options = tf.distribute.get_replica_context(), self._options()
        summed: dict[int, tf.Tensor] = {}
        # TensorFlow packs in the order of the layers, whose first gradients are there last, and gives no sum before all
        # are there. Packed here, a message travels beside the rest of the pass, and an update waits for its own alone.
        for indices in pack_indices(sizes, self.bytes_per_pack if are_known else 0):
            pack = [tensors[i] for i in indices]
            summed |= zip(indices, replica.all_reduce(tf.distribute.ReduceOp.SUM, pack, options=options), strict=True)
        return [summed[i] for i in range(len(tensors))]

    def all_to_all(self, rows: tf.Tensor, *, name: str) -> tf.Tensor:
        if self.topology.num_replicas == 1:
            return rows
        return self._collect(tf.raw_ops.CollectiveAllToAllV2, rows)

    def all_gather(self, vector: tf.Tensor, *, name: str) -> tf.Tensor:
        if self.topology.num_replicas == 1:
            return vector[tf.newaxis]
        # The public one asks for the lengths first, in a collective of its own.
        gathered = self._collect(
            tf.raw_ops.CollectiveGatherV2, vector[tf.newaxis], communication_hint=self.implementation.upper()
        )
        return tf.ensure_shape(gathered, [self.topology.num_replicas, *vector.shape])

    def _collect(self, operation: Callable[..., tf.Tensor], tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        """A collective of the replica that this is called on, by what starts TensorFlow's own, which is private."""
        replica = static_replica_index() - self.topology.first_replica
        extended = self.distribution.extended
        launcher = extended._get_cross_device_ops(tf.constant(0.0))._launchers[replica]
        with tf.device(extended.worker_devices[replica]):
            return operation(
                input=with_device(tensor),
                group_size=self.topology.num_replicas,
                group_key=launcher._group_key,
                instance_key=launcher._next_instance_key(),
                ordering_token=[launcher._get_ordering_token()],
                **options,
            )

    def _send_failure(self, report: FailureReport) -> None:
        # All later collectives fail on every worker, too. A code of its own: some errors of XLA are expected.
        with contextlib.suppress(tf.errors.FailedPreconditionError):  # another worker was first
            context.context().report_error_to_cluster(tf.errors.ABORTED, failure_report.encode(report))

    def _received_failure(self, error: BaseException) -> FailureReport | None:
        return failure_report.decode(str(error))

    def _options(self) -> tf.distribute.experimental.CommunicationOptions:
        implementation = tf.distribute.experimental.CommunicationImplementation(self.implementation.upper())
        return tf.distribute.experimental.CommunicationOptions(implementation=implementation)

    def _cluster(self) -> Cluster:
        cluster = read_tf_config(environment.current())
        if cluster is None:
            raise build_user_error(
                "The strategy multi_worker needs the environment variable TF_CONFIG, which is not set. For two workers "
                "on this machine run: tfdist launch -n 2 train EXPERIMENT.gin; else set it on each worker, "
                f"e.g. TF_CONFIG='{EXAMPLE}'",
                error_id="cluster-mismatch",
            )
        return cluster

    def _heartbeat_seconds(self, cluster: Cluster) -> float:
        if self.heartbeat_timeout_seconds != "auto":
            return float(self.heartbeat_timeout_seconds)
        return LOCAL_HEARTBEAT_SECONDS if cluster.is_of_one_machine else HEARTBEAT_SECONDS

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        cluster = self._cluster()
        hosts = [split_address(worker)[0] for worker in cluster.workers]
        environment.change(environment.without_proxy(hosts, environment.current()))
        try:
            rendezvous(cluster, timeout_seconds=self.peer_timeout_seconds, on_wait=notify)
        except AddressTakenError:
            heartbeat.add_exit_info(address_taken=True)  # a launcher that chose the address chooses another
            raise
        set_heartbeat_timeout(cluster, self._heartbeat_seconds(cluster))
        with preserve_sigterm_handler():
            try:
                set_threads_beside_collectives()
                distribution = tf.distribute.MultiWorkerMirroredStrategy(communication_options=self._options())
            except RuntimeError as error:
                if not any(words in str(error) for words in ("at program startup", "after initialization")):
                    raise
                raise UserError(
                    "The strategy multi_worker has to connect before TensorFlow computes anything, and this process "
                    "has made a variable, a tensor or a tf.data.Dataset already. Make them and the model in the scope: "
                    "with tfdist.choose_strategy().scope(): … Or start the script by tfdist launch."
                ) from error
            except tf.errors.UnknownError as error:
                if "Could not start gRPC server" not in str(error):
                    raise
                heartbeat.add_exit_info(address_taken=True)
                raise AddressTakenError(
                    f"{cluster.task_name(cluster.worker_index)} cannot listen at its address {cluster.address}: "
                    "another process, or a forked child of this one, took the port meanwhile. Start all workers again."
                ) from error
        watch_for_deaths(cluster)
        send_first_values(distribution)
        num_local = distribution.num_replicas_in_sync // cluster.num_workers
        return distribution, Topology(cluster.worker_index, cluster.num_workers, num_local_replicas=num_local)


def send_first_values(distribution: tf.distribute.Strategy) -> None:
    """Has a new variable of a type in `SENT_AS` get the first worker's value, as all others do."""
    find_value = distribution.extended._get_variable_creator_initial_value

    def find_in_other_type(replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        value, dtype = kwargs["initial_value"], kwargs.get("dtype")
        dtype = getattr(value, "dtype", None) if dtype is None else dtype
        sent_as = SENT_AS.get(dtype and tf.as_dtype(dtype))
        if replica_id > 0 or sent_as is None:
            return find_value(replica_id=replica_id, device=device, primary_var=primary_var, **kwargs)
        kwargs |= {"initial_value": lambda: tf.cast(value() if callable(value) else value, sent_as), "dtype": sent_as}
        found = find_value(replica_id=replica_id, device=device, primary_var=primary_var, **kwargs)
        return lambda: tf.cast(found(), dtype)

    Patches().replace(distribution.extended, _get_variable_creator_initial_value=find_in_other_type)


def set_threads_beside_collectives() -> None:
    """Gives operations more threads than a worker's one core, unless the program chose. Before TensorFlow starts.

    A collective's messages are operations too: with one thread they wait for whatever is being computed.
    """
    if len(os.sched_getaffinity(0)) == 1 and not tf.config.threading.get_inter_op_parallelism_threads():
        tf.config.threading.set_inter_op_parallelism_threads(THREADS_ON_ONE_CORE)


@contextlib.contextmanager
def preserve_sigterm_handler() -> Iterator[None]:
    """Puts this process's SIGTERM handler back: TensorFlow replaces it by one that takes note and continues.

    Without it a preempted or terminated worker would not end.
    """
    if threading.current_thread() is not threading.main_thread():  # only there may Python set handlers
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


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
    """Has this worker's collectives fail once a process that it watches is gone. After a strategy is made."""
    first, *others = [
        f"/job:{job}/replica:0/task:{index}" for job, workers in cluster.jobs.items() for index in range(len(workers))
    ]
    if not others:
        return
    watched = [first] if cluster.worker_index else others
    stop = threading.Event()
    thread = threading.Thread(target=_poll_until_one_died, args=(watched, stop), name="tfdist-deaths", daemon=True)
    thread.start()
    atexit.register(thread.join)  # TensorFlow must not end while it is asked
    atexit.register(stop.set)  # called first


def _poll_until_one_died(tasks: Sequence[str], stop: threading.Event) -> None:
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
