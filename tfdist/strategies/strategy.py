"""What a strategy offers to the training above it.

A strategy is made from settings alone and touches no device until `connect`. Underneath each one stands a
`tf.distribute.Strategy`, Horovod's included, so that variables, replica contexts and collectives mean the same
everywhere and the step, the loop and the evaluation are written once.

Invariant: after `connect` every worker knows the same number of replicas, and replica r of worker w is replica
w · num_local_replicas + r of the run.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import EXIT_DONE, PeerFailedError, UserError, build_user_error
from tfdist.strategies import failure_report
from tfdist.strategies.cluster import environment
from tfdist.strategies.cluster.tf_config import VARIABLE as TF_CONFIG
from tfdist.strategies.cluster.tf_config import read_tf_config
from tfdist.strategies.failure_report import FailureReport

Notify = Callable[[str], None]
T = TypeVar("T")
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"
BROADCAST_BYTES = 1 << 24  # in one collective
_TOGETHER = {
    TF_CONFIG: "train.strategy = @multi_worker.MultiWorker() (--gin_file=configs/strategies/multi_worker.gin)",
    environment.SLURM_TASKS: "slurm.sbatch of `tfdist new jobs --example=clusters`: it gives each task its TF_CONFIG",
}
_BY_HOROVOD = "train.strategy = @horovod.Horovod() (--gin_file=configs/strategies/horovod.gin)"
_WITHOUT_MPI = "tfdist launch --launcher=horovod, or horovodrun: this Horovod does not read it, as it has no MPI"
_connected: dict[int, Strategy] = {}  # by the id of what each stands on, which it keeps alive
_connecting: list[Strategy] = []  # with those that have connected


@dataclasses.dataclass(frozen=True)
class Topology:
    """The position of this process in the run."""

    worker_index: int
    num_workers: int
    num_local_replicas: int

    @property
    def num_replicas(self) -> int:
        return self.num_workers * self.num_local_replicas

    @property
    def is_chief(self) -> bool:
        return self.worker_index == 0

    @property
    def first_replica(self) -> int:
        """Index in the run of this worker's first replica."""
        return self.worker_index * self.num_local_replicas


MakeDataset = Callable[[Topology], tf.data.Dataset]


class Strategy(abc.ABC):
    """Devices of a run. Subclasses implement `_connect`; the rest follows from its `tf.distribute.Strategy`."""

    name: str
    needs_static_shapes = False
    """Whether a short batch has to be padded with examples of weight zero, because the compiler fixes all shapes."""

    gathers_rows = False
    """Whether rows of a large embedding's gradient can be sent in place of all of it. TensorFlow's own collectives
    demand that a gathering inside a loop has the same length in every iteration, which rows have not."""

    keeps_statistics_apart = False
    """Whether what a forward pass moves along (unsynchronized batch statistics) may differ from worker to worker."""

    is_one_program = False
    """Whether a whole step is one call of `run`, which may be nested in another: one program where each call is one."""

    feeds_one_device = False
    """Whether this process has one replica, whose batches are tensors and go to the first GPU, if there is one."""

    trains_alone = False
    """Whether it is for one process alone."""

    bytes_per_pack = 0
    """Bytes of gradients that go into one collective, where tfdist packs them; 0: all."""

    stages: tuple[str, ...] = ()
    """Names of the layers at which the second stage begins, the third …, where layers lie on several devices."""

    devices: tuple[str, ...] = ()
    """The stages' devices, once the run is joined."""

    num_hosts = 1
    """Machines on which this process has batches made; Python runs on this one alone."""

    reason: str | None = None
    """Why this strategy was picked, where `auto` picked it."""

    def __init__(self) -> None:
        self._distribution: tf.distribute.Strategy | None = None
        self._topology: Topology | None = None
        self._failure: FailureReport | None = None

    @abc.abstractmethod
    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        """Configures devices, joins the other workers; says through `notify` what a user should know."""

    def expected_replicas(self) -> int | None:
        """Returns the number of replicas that `connect` would find, without touching a device; None if unknown."""
        return None

    def check_alone(self) -> None:
        """Raises UserError where a strategy of one process stands in one of several, which would all train alone."""
        if self.trains_alone:
            refuse_others(self.name, environment.current())

    def connect(self, notify: Notify = lambda message: None) -> Topology:
        """Joins the run; once a process, a second call finds everything done.

        The first must come before any TensorFlow operation of this process. What was joined is left with the process:
        neither TensorFlow's collectives nor Horovod can be set up twice in one.

        Raises:
          UserError: the settings or the environment do not describe a cluster that this process is part of, or a
            worker of the cluster has failed since.
          PeerLostError: another worker did not come in time.
        """
        if self._failure is not None:
            raise UserError(
                "The workers are out of step, because an earlier training of these processes failed on worker "
                f"{self._failure.worker} ({self._failure.summary}). Start all workers again."
            )
        if self._topology is None:
            _connecting.append(self)
            self._distribution, self._topology = self._connect(notify)
            _connected[id(self._distribution)] = self
        return self._topology

    @property
    def topology(self) -> Topology:
        assert self._topology is not None, "connect() comes first"
        return self._topology

    @property
    def distribution(self) -> tf.distribute.Strategy:
        assert self._distribution is not None, "connect() comes first"
        return self._distribution

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The scope in which model, optimizer and metrics are made; joins the run first where nothing has."""
        self.connect()
        return self.distribution.scope()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Calls `function` once on every local replica; tensors in `args` may differ by replica."""
        if self.is_one_program and _in_replica():
            return function(*args)
        return self.distribution.run(function, args=args)

    def first_local(self, value: Any) -> Any:
        """The first local replica's part of a nest of values that `run` returned."""
        if self.is_one_program and _in_replica():
            return value
        return tf.nest.map_structure(lambda v: self.distribution.experimental_local_results(v)[0], value)

    def sum_over_replicas(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over all replicas of the run, in one reduction of each type. Called in replica context.

        Every replica gets the same bits.
        """
        if self.topology.num_replicas == 1:
            return list(tensors)
        return sum_by_type([with_device(t) for t in tensors], self._sum_of_one_type)

    def _sum_of_one_type(self, tensors: list[tf.Tensor]) -> Sequence[tf.Tensor]:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

    def from_first_replica(self, tensor: tf.Tensor) -> tf.Tensor:
        """The first replica's `tensor`, of a numeric type, on every replica. Called in replica context."""
        return self.sum_over_replicas([tf.where(tf.equal(replica_index(), 0), tensor, tf.zeros_like(tensor))])[0]

    def sum_gradients(
        self, gradients: Sequence[tf.Tensor], scalars: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Sums gradients and what must stay exact beside them, in the one reduction of a step. In replica context.

        Args:
          gradients: sums over this replica's examples, `tf.IndexedSlices` among them.
          scalars: loss sums, weights and the like.

        Returns:
          The sums of gradients, whose rows may come several times, and those of scalars.
        """
        sent = list(gradients)
        if self.topology.num_replicas > 1:
            sent = [sum_repeated_rows(g) if self.gathers_rows else tf.convert_to_tensor(g) for g in gradients]
        summed = self.sum_over_replicas([*sent, *scalars])
        return summed[: len(gradients)], summed[len(gradients) :]

    def all_to_all(self, rows: tf.Tensor, *, name: str) -> tf.Tensor:
        """Row r of each replica's tensor at replica r, in the order of the replicas. Called in replica context.

        Args:
          rows: [num_replicas, n], of one shape and type on every replica.
          name: what is exchanged, in letters and digits; the same on every replica.
        """
        del name
        if self.topology.num_replicas == 1:
            return rows

        def exchange(distribution: tf.distribute.Strategy, rows_by_replica: Any) -> Any:
            local = distribution.experimental_local_results(rows_by_replica)
            received = []
            for replica, own in enumerate(local):
                with tf.device(own.device):
                    received.append(tf.stack([rows[replica] for rows in local]))
            return distribution.experimental_distribute_values_from_function(
                lambda context: received[context.replica_id_in_sync_group]
            )

        return tf.distribute.get_replica_context().merge_call(exchange, args=(with_device(rows),))

    def all_gather(self, vector: tf.Tensor, *, name: str) -> tf.Tensor:
        """The replicas' vectors, [num_replicas, n], in their order. Called in replica context.

        Args:
          vector: [n], of one length and type on every replica.
          name: as in `all_to_all`.
        """
        del name
        if self.topology.num_replicas == 1:
            return vector[tf.newaxis]
        return tf.distribute.get_replica_context().all_gather(with_device(vector[tf.newaxis]), axis=0)

    def reduce_scatter(self, rows: tf.Tensor, *, name: str) -> tf.Tensor:
        """The sum over the replicas of row r, [n], at replica r. Called in replica context; arguments as `all_to_all`.

        Added up in the order of the replicas, so that the bits are the same under every strategy.
        """
        return tf.add_n(tf.unstack(self.all_to_all(rows, name=name), self.topology.num_replicas))

    def distribute(self, make: MakeDataset) -> Iterator[Any]:
        """An iterator over steps of local batches.

        Args:
          make: gives an endless dataset for the replicas of a topology, whose consecutive elements go to them. Called
            once for each host that feeds replicas of this process: this machine, or each host of a TPU.
        """

        if self.feeds_one_device:
            dataset, gpus = make(self.topology), tf.config.list_logical_devices("GPU")
            if gpus:  # the next batch is there already
                dataset = dataset.apply(tf.data.experimental.prefetch_to_device(gpus[0].name, buffer_size=1))
            return iter(dataset)

        def build_for_host(context: tf.distribute.InputContext) -> tf.data.Dataset:
            num_hosts = context.num_input_pipelines
            num_local = context.num_replicas_in_sync // num_hosts
            return make(Topology(context.input_pipeline_id, num_hosts, num_local))

        return iter(self.distribution.distribute_datasets_from_function(build_for_host))

    def synchronize(self, variables: Sequence[Any]) -> None:
        """Gives every worker the chief's values of Keras `variables`, once, before training."""
        # tf.distribute's own strategies do this when a variable is created.

    def send_variables(self, variables: Sequence[Any]) -> None:
        """Gives every worker the values of Keras `variables` that the chief has changed by itself. A collective."""
        if self.topology.num_workers == 1:
            return
        for variable in variables:
            mine = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
            received = self.broadcast(mine.reshape(-1).view(np.uint8).data)
            if not self.topology.is_chief:
                variable.assign(np.frombuffer(received, mine.dtype).reshape(mine.shape))

    def sum_over_workers(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Sums float64 `values`, a vector that each worker holds on the host, over the workers.

        A collective: every worker calls it at the same point of the run. Sums of flags are how workers agree.
        """
        vector = np.asarray(values, np.float64)
        if self.topology.num_workers == 1:
            return vector
        return self._summed_over_workers(tf.constant(vector)).numpy()

    @functools.cached_property
    def _summed_over_workers(self) -> Callable[[tf.Tensor], tf.Tensor]:
        return tf.function(self._sum_on_first_replicas, reduce_retracing=True, autograph=False)

    def _sum_on_first_replicas(self, vector: tf.Tensor) -> tf.Tensor:
        def on_replica() -> tf.Tensor:
            is_first = tf.equal(replica_index() % self.topology.num_local_replicas, 0)
            return self.sum_over_replicas([tf.where(is_first, vector, tf.zeros_like(vector))])[0]

        return self.first_local(self.run(on_replica))

    def gather_from_workers(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Every worker's `values`, float64 [num_workers, len(values)]; a collective like `sum_over_workers`."""
        rows = np.zeros((self.topology.num_workers, len(values)))
        rows[self.topology.worker_index] = values
        return self.sum_over_workers(rows.ravel()).reshape(rows.shape)

    def broadcast(self, data: bytes | memoryview | None, worker: int = 0) -> bytes | memoryview:
        """One worker's `data` on every worker; what the others pass is ignored. A collective as `sum_over_workers`."""
        sends = worker == self.topology.worker_index
        assert data is not None or not sends
        mine = np.frombuffer(data, np.uint8) if data is not None and sends else None
        if self.topology.num_workers == 1:
            assert data is not None
            return data
        size = int(self.sum_over_workers([0 if mine is None else mine.size])[0])
        received = bytearray(size)
        for begin in range(0, size, BROADCAST_BYTES):
            end = min(begin + BROADCAST_BYTES, size)
            words = np.zeros(-(-(end - begin) // 8), np.int64)
            if mine is not None:
                words.view(np.uint8)[: end - begin] = mine[begin:end]
            received[begin:end] = self._broadcast_words(words, worker).view(np.uint8)[: end - begin].data
        return memoryview(received)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every worker's `data`, in their order. A collective."""
        return [bytes(self.broadcast(data, worker)) for worker in range(self.topology.num_workers)]

    def _broadcast_words(self, words: np.ndarray, worker: int) -> np.ndarray:
        """The int64 vector of `worker`; the others pass zeros, and adding those to integers changes no bit."""
        return self._summed_over_workers(tf.constant(words)).numpy()

    def any_worker(self, flag: bool) -> bool:
        """Whether any worker's `flag` is set; a collective like `sum_over_workers`."""
        return bool(self.sum_over_workers([float(flag)])[0] > 0)

    def on_chief(self, act: Callable[[], T], failed: str) -> T | None:
        """Returns what `act` returns on the chief, None on the others; a collective.

        Args:
          act: reads or writes what belongs to the whole run; called on the chief alone.
          failed: begins the message where it raised OSError, "The checkpoints cannot be read".

        Raises:
          UserError: for its OSError, on every worker with the same words and exit status.
          Exception: what else it raised, on the chief; PeerFailedError on the others, with its words and exit status.
        """
        return self.on_every_worker(act if self.topology.is_chief else lambda: None, failed)

    def read_on_chief(self, read: Callable[[], T], failed: str) -> T:
        """Returns the chief's `read()` on every worker, as JSON carries it; arguments and errors as `on_chief`."""
        value = self.on_chief(read, failed)
        if self.topology.num_workers == 1:
            return cast(T, value)
        text = json.dumps(value).encode() if self.topology.is_chief else None
        return json.loads(bytes(self.broadcast(text)))

    def on_every_worker(self, act: Callable[[], T], failed: str | None = None) -> T:
        """Calls `act` on each worker; raises as `on_chief`, for the first worker that fails. A collective.

        Without `failed` an OSError is raised as it is.
        """
        value: Any = None
        problem: Exception | None = None
        status, text, error_id = EXIT_DONE, "", None
        try:
            value = act()
        except Exception as error:
            problem = error
            if failed is not None and isinstance(error, OSError):
                problem = UserError(f"{failed}: {error}")
                problem.__cause__ = error
            status, text, error_id = failure_report.describe(problem)
        statuses = self.gather_from_workers([status])[:, 0]
        failures = np.flatnonzero(statuses != EXIT_DONE)
        if not failures.size:
            return value
        worker = int(failures[0])
        text, error_id = json.loads(bytes(self.broadcast(json.dumps([text, error_id]).encode(), worker)))
        if worker != self.topology.worker_index or problem is None:
            problem = PeerFailedError(worker, text, exit_status=int(statuses[worker]), error_id=error_id)
        problem.is_in_step = True  # type: ignore[attr-defined]
        raise problem

    def report_failure(self, error: BaseException) -> None:
        """Has the other workers' collectives fail with what ended the run here, and this strategy refuse another run.

        An error that all workers raise in step needs no report.
        """
        if self._topology is None or self._topology.num_workers == 1 or getattr(error, "is_in_step", False):
            return
        if self._failure is None:
            self._failure = FailureReport(self._topology.worker_index, *failure_report.describe(error))
            self._send_failure(self._failure)

    def peer_failure(self, error: BaseException) -> PeerFailedError | None:
        """Returns another worker's reported failure, where a collective failed because of it; None where none has."""
        if self._topology is None or self._topology.num_workers == 1:
            return None
        report = self._received_failure(error)
        if report is None or report.worker == self._topology.worker_index:
            return None
        self._failure = report
        return PeerFailedError(report.worker, report.text, exit_status=report.status, error_id=report.error_id)

    def _send_failure(self, report: FailureReport) -> None:
        """Makes `report` known to the other workers; strategies of several workers override it."""

    def _received_failure(self, error: BaseException) -> FailureReport | None:
        """The report that `error`, of a collective, comes from."""
        return None

    def from_chief(self, values: Sequence[float]) -> np.ndarray:
        """The chief's `values` on every worker; a collective like `sum_over_workers`."""
        chiefs = np.asarray(values, np.float64)
        return self.sum_over_workers(chiefs if self.topology.is_chief else np.zeros_like(chiefs))


def _in_replica() -> bool:
    """Whether this is called within `run` of a strategy that is not TensorFlow's default."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def num_replicas() -> int:
    """Returns the number of replicas that compute at once; 1 outside of a replica context."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def replica_index() -> tf.Tensor:
    """int32 scalar, this replica's among all of the run."""
    context = tf.distribute.get_replica_context()
    return tf.constant(0) if context is None else tf.cast(tf.reshape(context.replica_id_in_sync_group, []), tf.int32)


def static_replica_index() -> int:
    """This replica's index among all of the run, while it is traced; every replica is traced by itself."""
    context = tf.distribute.get_replica_context()
    index = 0 if context is None else tf.get_static_value(context.replica_id_in_sync_group)
    assert index is not None, "the strategy traces all replicas as one"
    return int(index)


def find_connected(distribution: tf.distribute.Strategy) -> Strategy | None:
    """The strategy of this process that stands on `distribution`; None for one that somebody else made."""
    return _connected.get(id(distribution))


def find_joined() -> Strategy | None:
    """The strategy by which this process has joined a cluster; None where it is alone."""
    return next((each for each in _connected.values() if not each.trains_alone), None)


def has_begun() -> bool:
    """Whether a strategy of this process has begun to connect."""
    return bool(_connecting)


def with_device(tensor: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """The tensor with a device: TensorFlow asks where a sum should go, and what was read from a variable has none."""
    return tensor if isinstance(tensor, tf.IndexedSlices) else tf.identity(tensor)


def sum_by_type(
    tensors: Sequence[tf.Tensor], sum_of_one_type: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]
) -> list[tf.Tensor]:
    """Sums tensors with those of the same type, since one collective carries one type.

    int32 travels as int64: TensorFlow keeps it on the host and refuses to all-reduce it between GPUs.
    """
    sent = [tf.cast(t, tf.int64) if t.dtype == tf.int32 else t for t in tensors]
    summed: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in sent):
        indices = [i for i, t in enumerate(sent) if t.dtype == dtype]
        summed |= zip(indices, sum_of_one_type([sent[i] for i in indices]), strict=True)
    return [tf.cast(summed[i], t.dtype) if t.dtype == tf.int32 else summed[i] for i, t in enumerate(tensors)]


def sum_repeated_rows(gradient: Gradient) -> Gradient:
    """Adds up the rows of one index, so that less is sent, and norms are those of the dense gradient."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.shape(indices)[0])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def refuse_others(strategy: str, variables: Mapping[str, str]) -> None:
    """Raises UserError where this process is one of several, and the strategy found or finds none of them."""
    cluster = read_tf_config(variables)
    counts = {TF_CONFIG: str(cluster.num_workers)} if cluster is not None else {}
    counts |= {name: variables.get(name, "") for name in (*environment.HOROVOD_SIZES, environment.SLURM_TASKS)}
    for name, count in counts.items():
        if count.isdecimal() and int(count) > 1:
            together = _WITHOUT_MPI if strategy == "horovod" else _TOGETHER.get(name, _BY_HOROVOD)
            raise build_user_error(
                f"The strategy {strategy} trains in one process here, and {name} says that this is one of {count}. "
                "Each of them would train by itself, into the same run directory. To train together, use "
                f"{together}. To train in this process alone on purpose, drop the variable: env -u {name} tfdist …",
                error_id="cluster-mismatch",
            )
