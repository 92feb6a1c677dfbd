"""Examples from a user's own `tf.data.Dataset`, which can be read from its beginning only.

Invariant: under the policy "data" global batch k of epoch e is the k-th of that epoch for any number of workers, each
of which reads everything and takes its replicas' parts. Under "off" every worker draws its part of each batch from a
stream of its own. A stream that begins at a step skips what comes before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.failures import record_errors
from tfdist.data.sources.source import Order, Reader, Source
from tfdist.errors import UserError, build_user_error
from tfdist.keras_patches.patches import SharedPatch
from tfdist.settings.checks import COUNT, one_of, or_none
from tfdist.strategies.strategy import Topology

POLICIES = {
    "data": "every worker reads all and takes its part of each batch",
    "off": "every worker reads its own stream; in an epoch some examples come more than once and others not at all",
}
ALL = Topology(0, 1, 1)  # a worker that reads everything
SliceBatch = Callable[[tf.Tensor, tf.Tensor, Any], dict[str, tf.Tensor]]
_SEED_STRIDE = 1_000_003  # keeps epochs of one run's seed apart from those of the next
_LOG = logging.getLogger(__name__)


class StreamSource(Source):
    """A source that cannot read an example by its index, and therefore builds its batches itself."""

    cheaper = (
        "In your dataset's function, map with num_parallel_calls=tf.data.AUTOTUNE and keep what fits with "
        "Dataset.cache(), before what is random"
    )
    calls_python = True

    def reader(self, order: Order) -> Reader:
        """Refuses to read by position."""
        raise UserError(
            f"A {type(self).__name__} is read from its beginning and cannot be part of a mixture. Use a source that "
            "reads by index (arrays, files, images), or mix inside your own function."
        )

    def local_batches(self, plan: BatchPlan, topology: Topology, first_step: int) -> tf.data.Dataset:
        """Builds this worker's batches from `first_step` on; `pipeline.build_pipeline` documents their form."""
        raise NotImplementedError


class DatasetFunction(StreamSource):
    """A function that returns a `tf.data.Dataset` of single examples `x`, `(x, y)` or `(x, y, sample_weight)`.

        train.train_data = @user_dataset.DatasetFunction
        user_dataset.DatasetFunction.function = @my_data.make_dataset

    A function with a parameter `epoch`, `seed` or both is called anew for every epoch, with its number and a seed made
    of the run's and that number, which makes resuming cheap. The dataset of any other is repeated, and shuffles again
    as its own `shuffle` says. An evaluation always has those of epoch 0. What draws without a seed of its own
    (`shuffle`, random operations in `map`) draws by the run's, whatever was drawn or read before: the same order under
    every strategy and after a restart. What Python or NumPy draws inside the function is not repeated.

    Args:
      function: gives the dataset.
      policy: "data": every worker reads all and takes its part, the same batches for any number of workers. "off": the
        function shares the examples out itself, by a parameter `input_context` (`tf.distribute.InputContext`) that
        names the worker; or they are random and without end.
      num_examples: of an epoch; needed where the dataset has no end. None counts, once, where it is not known.
      unbatch: True takes batches apart, False takes each element for one example; None refuses what looks like batches.

    Raises:
      UserError: the function gives no such dataset.
    """

    def __init__(
        self,
        function: Callable[..., tf.data.Dataset],
        *,
        policy: str = "data",
        num_examples: int | None = None,
        unbatch: bool | None = None,
    ) -> None:
        one_of(*POLICIES)("DatasetFunction.policy", policy)
        or_none(COUNT)("DatasetFunction.num_examples", num_examples)
        self._function = function
        self._unbatch = unbatch
        self._policy = policy
        self.has_same_batches = policy == "data"
        self._takes = frozenset(inspect.signature(function).parameters)
        self._parameters = [name for name in ("epoch", "seed") if name in self._takes]
        dataset = self._call_function(0, None)
        self._is_endless = bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)
        self.structure = _batched_structure(dataset, may_be_batches=unbatch is None)
        self._is_counted = num_examples is None
        if num_examples is None and self._is_endless:
            raise UserError("The dataset has no end. Write for an epoch: tfdist.DatasetFunction.num_examples = N.")
        setting = "tfdist.DatasetFunction.num_examples"
        self.num_examples = num_examples or count_elements(dataset, "examples", setting)

    def describe(self) -> list[str]:
        """Describes how the dataset resumes, and how workers share the examples."""
        resumes = "resumes by skipping from the first epoch on"
        if self._parameters:
            resumes = (
                f"made anew each epoch with its {' and '.join(self._parameters)}; resumes by skipping in the epoch"
            )
        return [f"a tf.data.Dataset: {resumes}; policy {self._policy!r}: {POLICIES[self._policy]}"]

    def local_batches(self, plan: BatchPlan, topology: Topology, first_step: int) -> tf.data.Dataset:
        """Builds this worker's batches, as `policy` shares the examples out."""
        if self._policy == "data":
            batches = self._build_global_batches(plan, first_step)
            return split_batches(batches, topology, first_step, functools.partial(_slice_batch, plan, None))
        # Every batch is full, as the epochs of workers need not be as long; a worker reads its own places of each.
        plan = dataclasses.replace(plan, num_examples=plan.global_batch_size)
        replicas = range(topology.first_replica, topology.first_replica + topology.num_local_replicas)
        slices = [plan.replica_slice(tf.constant(0, tf.int64), tf.constant(r, tf.int64)) for r in replicas]
        places = np.unique(np.concatenate([piece["positions"].numpy() for piece in slices]))
        dataset = self._call_function(0, plan.shuffle_seed, topology)
        if not self._is_endless:
            dataset = dataset.repeat()
        batches = dataset.batch(len(places), drop_remainder=True).skip(first_step)
        return split_batches(batches, topology, first_step, functools.partial(_slice_batch, plan, places))

    def _build_global_batches(self, plan: BatchPlan, first_step: int) -> tf.data.Dataset:
        epoch, step = divmod(first_step, plan.steps_per_epoch)

        def batch_epoch(dataset: tf.data.Dataset) -> tf.data.Dataset:
            taken = dataset if self._is_counted else dataset.take(self.num_examples)
            whole = taken.apply(tf.data.experimental.assert_cardinality(self.num_examples))
            return whole.batch(plan.global_batch_size, drop_remainder=plan.drop_remainder)

        if self._parameters and plan.shuffle_seed is not None:
            first = batch_epoch(self._call_function(epoch, plan.shuffle_seed)).skip(step)
            return first.concatenate(self._chain_epochs(epoch + 1, plan.shuffle_seed, batch_epoch))
        dataset = self._call_function(0, plan.shuffle_seed)
        if self._is_endless:
            return dataset.batch(plan.global_batch_size).skip(first_step)
        return batch_epoch(dataset).repeat().skip(first_step)  # a dataset that shuffles has other epochs each time

    def _chain_epochs(
        self, first: int, seed: int, batch_epoch: Callable[[tf.data.Dataset], tf.data.Dataset]
    ) -> tf.data.Dataset:
        """The batches of epoch `first` and all later ones; the user's function makes a dataset for each in its turn."""
        spec = self._call_function(first, seed).element_spec
        held: dict[int, tf.data.Dataset] = {}  # what a running iterator may still need

        def make_variant(epoch: tf.Tensor) -> tf.Tensor:
            number = int(epoch)
            dataset = held[number] = self._call_function(number, seed)
            held.pop(number - 3, None)
            if dataset.element_spec != spec:
                raise UserError(f"The dataset of epoch {number} gives {dataset.element_spec}, others {spec}.")
            return tf.data.experimental.to_variant(dataset)

        def batches(epoch: tf.Tensor) -> tf.data.Dataset:
            made = tf.ensure_shape(tf.py_function(record_errors(make_variant), [epoch], tf.variant), [])
            return batch_epoch(tf.data.experimental.from_variant(made, spec))

        return tf.data.Dataset.range(first, tf.int64.max).flat_map(batches)

    def _call_function(self, epoch: int, seed: int | None, topology: Topology = ALL) -> tf.data.Dataset:
        values = {
            "epoch": epoch,
            "seed": ((seed or 0) * _SEED_STRIDE + epoch) & 0x7FFFFFFF,
            "input_context": tf.distribute.InputContext(
                topology.num_workers, topology.worker_index, topology.num_replicas
            ),
        }
        arguments = {name: value for name, value in values.items() if name in self._takes}
        options = tf.data.Options()
        options.deterministic = True
        with _global_seed(seed or 0):
            dataset = self._function(**arguments)
            if isinstance(dataset, tf.data.Dataset):
                dataset = dataset.unbatch() if self._unbatch else dataset
                has_parts = isinstance(dataset.element_spec, tuple)
                return (dataset if has_parts else dataset.map(lambda x: (x,))).with_options(options)
        raise UserError(
            f"DatasetFunction.function returns a tf.data.Dataset; received {type(dataset).__name__}. Functions that "
            "return arrays are data functions by themselves."
        )


def count_elements(dataset: tf.data.Dataset, noun: str, setting: str) -> int:
    """Counts a dataset's elements, by reading all if need be; a warning says which setting spares that. -1: no end."""
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        count = int(dataset.reduce(np.int64(0), lambda n, *_: n + 1))
        _LOG.warning("Counted %d %s by reading the whole dataset; %s = %d spares that.", count, noun, setting, count)
    return count


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Sets TensorFlow's global seed in this thread alone: other threads draw and trace meanwhile."""
    before = getattr(_THREAD, "seeds", None)
    _THREAD.seeds = seed, random.Random(seed)  # the second gives those of operations that have none
    context.context().clear_kernel_cache()  # as `tf.random.set_seed` does, for operations that have a seed of their own
    try:
        with _SEEDS_BY_THREAD:
            yield
    finally:
        _THREAD.seeds = before


_THREAD = threading.local()
_process_global_seed, _draw_process_seed = context.global_seed, context.internal_operation_seed


def _find_global_seed() -> int | None:
    seeds = getattr(_THREAD, "seeds", None)
    return _process_global_seed() if seeds is None else seeds[0]


def _draw_operation_seed() -> int:
    seeds = getattr(_THREAD, "seeds", None)
    return _draw_process_seed() if seeds is None else seeds[1].randint(0, 2**31 - 1)


# Has TensorFlow look for a thread's own seeds first, in the two functions that all its operations ask.
_SEEDS_BY_THREAD = SharedPatch(context, global_seed=_find_global_seed, internal_operation_seed=_draw_operation_seed)


def _slice_batch(
    plan: BatchPlan, places: np.ndarray | None, step: tf.Tensor, replica: tf.Tensor, batch: Any
) -> dict[str, tf.Tensor]:
    """A replica's rows of the global batch of a step; of what is read of it alone, where that has its `places`."""
    del batch
    piece = plan.replica_slice(step, replica)
    del piece["epoch"]
    rows = piece["positions"] - step % plan.steps_per_epoch * plan.global_batch_size
    rows = rows if places is None else tf.searchsorted(tf.constant(places), rows)
    return piece | {"positions": tf.ensure_shape(rows, [plan.width])}


def split_batches(
    batches: tf.data.Dataset, topology: Topology, first_step: int, slice_batch: SliceBatch
) -> tf.data.Dataset:
    """Gives each batch, a tuple, once for each local replica, which takes its rows.

    Args:
      batches: from `first_step` on.
      topology: of the worker.
      first_step: of the run.
      slice_batch: gives, for a step, a replica and the batch, the rows as `positions`, and what else belongs to them.
    """
    num_local = topology.num_local_replicas
    if num_local > 1:
        batches = batches.flat_map(lambda *batch: tf.data.Dataset.from_tensors(batch).repeat(num_local))

    def take_rows(turn: tf.Tensor, batch: Any) -> dict[str, Any]:
        piece = slice_batch(turn // num_local, topology.first_replica + turn % num_local, batch)
        rows = piece.pop("positions")
        return {"examples": tf.nest.map_structure(lambda part: tf.gather(part, rows), batch), **piece}

    turns = tf.data.Dataset.range(first_step * num_local, tf.int64.max)
    return tf.data.Dataset.zip(turns, batches).map(take_rows, num_parallel_calls=2, deterministic=True)


def _batched_structure(dataset: tf.data.Dataset, *, may_be_batches: bool) -> Any:
    """The structure of a batch of the dataset's examples; raises UserError where they are batches, if they may be."""
    spec = dataset.element_spec
    if len(spec) not in (1, 2, 3):
        raise UserError(f"The dataset gives x, (x, y) or (x, y, sample_weight) for each example; received {spec}.")
    flat = tf.nest.flatten(spec)
    if not all(isinstance(each, tf.TensorSpec) for each in flat):
        raise UserError(f"The dataset gives dense tensors; received {spec}. Pad ragged and sparse ones.")
    if any(each.shape.rank is None for each in flat):
        raise UserError(
            f"The dataset does not say the shapes of its examples, {spec}. Give Dataset.from_generator an "
            "output_signature, or use tf.ensure_shape behind tf.py_function."
        )
    batching = find_batching(dataset) if may_be_batches else None
    if batching is not None and all(each.shape.rank and each.shape[0] in (None, batch_size(batching)) for each in flat):
        raise build_user_error(
            f"The dataset gives batches, {spec}; it has to give single examples, of which tfdist makes the batches. "
            "Take out Dataset.batch, or set tfdist.DatasetFunction.unbatch = True; False takes each for one example.",
            error_id="data-structure",
        )
    return tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape], each.dtype), spec)


def find_batching(dataset: Any) -> Any:
    """The last `Dataset.batch` among what a dataset is built of; None where there is none, or batches are taken apart.

    It is read from TensorFlow's private classes: what is not recognized counts as not there.
    """
    name = type(dataset).__name__
    if any(each in name for each in ("UnbatchDataset", "FlatMapDataset", "InterleaveDataset", "WindowDataset")):
        return None
    if "BatchDataset" in name:
        return dataset
    inputs = dataset._inputs()
    return find_batching(inputs[0]) if inputs else None


def batch_size(batching: Any) -> int | None:
    """The examples of a full batch of a dataset that `find_batching` gave, where it is known without reading."""
    size = tf.get_static_value(getattr(batching, "_batch_size", None))
    return None if size is None else int(size)
