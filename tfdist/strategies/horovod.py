"""Many processes through Horovod. The only importer of Horovod, and only when it is chosen.

Horovod is presented as a `tf.distribute.Strategy` of one local replica whose all-reduce is
`hvd.grouped_allreduce`. Whatever asks TensorFlow for a replica context (synchronized batch normalization, metrics,
the optimizer) thus reduces over Horovod's workers without knowing it. Horovod's own Keras wrapper, which does not
know Keras 3, stays out of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import build_user_error
from tfdist.settings.checks import SECONDS
from tfdist.strategies.cluster import environment
from tfdist.strategies.cluster.horovod_rendezvous import get_failure, meet, put_failure, read_store
from tfdist.strategies.failure_report import FailureReport
from tfdist.strategies.one_device import LoneReplica, use_only
from tfdist.strategies.strategy import Notify, Strategy, Topology, refuse_others

_counted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # reductions by traced function


class Horovod(Strategy):
    """Horovod, one process a replica, started by `horovodrun` or `python -m tfdist.launch --launcher=horovod`.

    Args:
      peer_timeout_seconds: how long to wait for the other workers at the start.
    """

    name = "horovod"
    gathers_rows = True
    feeds_one_device = True
    keeps_statistics_apart = True

    def __init__(self, peer_timeout_seconds: float = 600.0) -> None:
        super().__init__()
        SECONDS("Horovod.peer_timeout_seconds", peer_timeout_seconds)
        self.peer_timeout_seconds = peer_timeout_seconds

    def expected_replicas(self) -> int | None:
        variables = environment.current()
        name = environment.first_set(environment.HOROVOD_SIZES, variables)
        return 1 if name is None else int(variables[name])

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        self._hvd = import_horovod()
        if environment.first_set(environment.HOROVOD_MARKS, environment.current()) is None:
            raise build_user_error(
                "The strategy horovod was chosen, and horovodrun has not started this process (none of "
                f"{', '.join(environment.HOROVOD_MARKS)} is set): it would train alone. Start it with `python -m "
                "tfdist.launch --workers=2 --launcher=horovod -- --gin_file=…` or `horovodrun -np 2 python -m "
                "tfdist.main --gin_file=…`. For one worker on purpose, write 1 there.",
                error_id="cluster-mismatch",
            )
        self._store = store = read_store(environment.current())
        if store is not None:
            meet(store, timeout_seconds=self.peer_timeout_seconds, on_wait=notify)
        self._hvd.init()
        if self._hvd.size() == 1:
            refuse_others(self.name, environment.current())
        gpus = tf.config.list_physical_devices("GPU")
        device = f"GPU:{self._hvd.local_rank() % len(gpus)}" if gpus else "CPU"
        use_only(device)
        distribution = LoneReplica("GPU:0" if gpus else "CPU:0", self._hvd.size(), self._hvd.rank, self._add)
        return distribution, Topology(self._hvd.rank(), self._hvd.size(), num_local_replicas=1)

    def _add(self, values: Sequence[Any]) -> list[Any]:
        """The sums of tensors over the workers, and the rows of all of them."""
        dense = [tf.convert_to_tensor(v) for v in values if not isinstance(v, tf.IndexedSlices)]
        reduced = iter(self._hvd.grouped_allreduce(dense, op=self._hvd.Sum, **_name("sum")) if dense else ())
        return [self._gather(v) if isinstance(v, tf.IndexedSlices) else next(reduced) for v in values]

    def _gather(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        values = self._hvd.allgather(slices.values, **_name("values"))
        return tf.IndexedSlices(values, self._hvd.allgather(slices.indices, **_name("indices")), slices.dense_shape)

    def from_first_replica(self, tensor: tf.Tensor) -> tf.Tensor:
        # Not a sum: its part on the others is a constant, and TensorFlow takes what is constant out of a loop, which
        # leaves the first worker alone with the reductions of all iterations but one.
        return self._hvd.broadcast(tensor, root_rank=0, **_name("first"))

    def all_to_all(self, rows: tf.Tensor, *, name: str) -> tf.Tensor:
        # Horovod's own reduce-scatter, which this stands in for too, is wrong at times over Gloo.
        received, _ = self._hvd.alltoall(rows, splits=[1] * self.topology.num_replicas, **_name(name))
        return tf.ensure_shape(received, rows.shape)

    def all_gather(self, vector: tf.Tensor, *, name: str) -> tf.Tensor:
        gathered = self._hvd.allgather(vector[tf.newaxis], **_name(name))
        return tf.ensure_shape(gathered, [self.topology.num_replicas, *vector.shape])

    def synchronize(self, variables: Sequence[Any]) -> None:
        if variables:
            self._hvd.broadcast_variables([v.value for v in variables], root_rank=0)

    def sum_over_workers(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        vector = np.asarray(values, np.float64)
        if self.topology.num_workers == 1:
            return vector
        return self._hvd.allreduce(tf.constant(vector), op=self._hvd.Sum, name="tfdist.sum_over_workers").numpy()

    def _broadcast_words(self, words: np.ndarray, worker: int) -> np.ndarray:
        return self._hvd.broadcast(tf.constant(words), root_rank=worker, name="tfdist.broadcast").numpy()

    def _send_failure(self, report: FailureReport) -> None:
        if self._store is not None:
            put_failure(self._store, report)
        self._hvd.shutdown()  # on which the others' collectives fail

    def _received_failure(self, error: BaseException) -> FailureReport | None:
        # Horovod's own error says only that it has been shut down.
        if self._store is None or not isinstance(error, (tf.errors.OpError, RuntimeError)):
            return None
        return get_failure(self._store)


def _name(kind: str) -> dict[str, Any]:
    """The name of a collective that is traced now, the same on every worker: by it Horovod finds which belong together.

    Without one it takes the operation's own in the whole graph, which counts the operations that were traced before.
    These are not the same where each worker updates variables of its own. Counted are the collectives of the function
    that is being traced, which are.
    """
    if tf.executing_eagerly():
        return {}
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    number = _counted[graph] = _counted.get(graph, -1) + 1
    return {"name": f"tfdist.{kind}.{number}", "ignore_name_scope": True}


def import_horovod() -> ModuleType:
    """Imports Horovod's TensorFlow module.

    Raises:
      UserError: it is not installed, or was built for another TensorFlow.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise build_user_error(
            f"The strategy horovod needs Horovod built for TensorFlow {tf.__version__}: {error}. "
            "Run: python -m tfdist.build_horovod",
            error_id="missing-package",
        ) from error
    return hvd
