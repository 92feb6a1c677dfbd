"""Pipeline from a source to the endless stream of local batches that a worker's replicas take turns in.

Invariant: element t of the stream depends on (plan, worker, t) alone, so a stream may begin at any step at the same
cost, and there is no state to save.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.source import Order, Source, StagedReader, example_seeds
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.errors import UserError
from tfdist.strategies.strategy import Topology

PREFETCHED_STEPS = 8
PARALLEL_READS = 4
PARALLEL_DECODES = max(4, len(os.sched_getaffinity(0)))  # more than cores: parts of a decoding keep one core only
SAMPLED_BATCHES = 8  # of a digest
SAMPLED_BYTES = 2**28  # of an array


def build_pipeline(
    source: Source,
    plan: BatchPlan,
    topology: Topology,
    *,
    first_step: int = 0,
) -> tf.data.Dataset:
    """Local batches from step `first_step` on, forever; those of one step follow each other by local replica.

    Each element is a dict: `examples`, a nest with batch axes of this replica's size, and the plan's `splits` and
    `shares` where it gives them.
    """
    num_local = topology.num_local_replicas
    if plan.pad:
        _check_static_shapes(source.structure)
    if isinstance(source, StreamSource):
        dataset = source.local_batches(plan, topology, first_step)
    else:
        turns = tf.data.Dataset.range(first_step * num_local, tf.int64.max)
        dataset = _read_by_position(source, plan, topology, turns)
    # Endless by construction; saying so spares tf.distribute a check for the end at every step.
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    dataset = dataset.prefetch(PREFETCHED_STEPS * num_local)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = False  # with it on, dropping an iterator can block for seconds
    if source.arrays_in_memory() is not None:
        # There is nothing to fuse in looking up arrays, and a pipeline that is rewritten copies all that it holds.
        options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def _read_by_position(source: Source, plan: BatchPlan, topology: Topology, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The local batches with these numbers of a source that reads by position."""
    read = source.reader(Order(plan.global_batch_size, plan.shuffle_seed))
    plain = tf.autograph.experimental.do_not_convert  # rewriting them takes half a second, and `map_inline` does not
    stages = read if isinstance(read, StagedReader) else StagedReader(read, lambda examples: examples)
    num_local = topology.num_local_replicas

    def fetch_batch(t: tf.Tensor) -> dict[str, Any]:
        piece = plan.replica_slice(t // num_local, topology.first_replica + t % num_local)
        return {"fetched": stages.fetch(piece["positions"], piece["epoch"]), **piece}

    def decode_batch(piece: dict[str, Any]) -> dict[str, Any]:
        piece = dict(piece)
        positions, epoch = piece.pop("positions"), piece.pop("epoch")
        examples = stages.decode(piece.pop("fetched"))
        if source.augment is not None and plan.shuffle_seed is not None:
            examples = source.augment(examples, example_seeds(positions, epoch, plan.shuffle_seed))
        return plan.fix_shapes({"examples": examples, **piece})

    if stages is read and not source.waits:
        dataset = map_inline(dataset, fetch_batch)
        return dataset.map(plain(decode_batch), num_parallel_calls=PARALLEL_DECODES, deterministic=True)

    def read_whole(t: tf.Tensor) -> dict[str, Any]:
        return decode_batch(fetch_batch(t))

    if source.calls_python:
        return dataset.map(plain(read_whole), num_parallel_calls=PARALLEL_READS, deterministic=True)
    return map_inline(dataset, read_whole)


def map_inline(dataset: tf.data.Dataset, function: Callable[[tf.Tensor], Any]) -> tf.data.Dataset:
    """`dataset.map(function)`, with the operations of `function` run one after the other by the thread that asks.

    `Dataset.map` hands each operation to a pool of threads, which costs a few quick ones more than they take and keeps
    the operations of the step waiting (benchmarks/performance.md). What is slow inside, such as gathering large rows,
    still uses all cores. A function with loops or branches of TensorFlow's runs as `Dataset.map` would run it, several
    elements at a time.
    """
    traced = tf.function(function, autograph=False).get_concrete_function(dataset.element_spec)
    if _has_control_flow(traced.graph):
        plain = tf.autograph.experimental.do_not_convert(traced)
        return dataset.map(plain, num_parallel_calls=PARALLEL_READS, deterministic=True)
    structure = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs)
    specs = tf.nest.flatten(structure)
    mapped = tf.raw_ops.MapDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=traced.captured_inputs,
        f=traced,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
        use_inter_op_parallelism=False,
        preserve_cardinality=True,
    )
    found = tf.data.experimental.from_variant(mapped, structure)
    found.kept_alive = traced  # or Python code that it calls would be gone when an iterator asks for it
    return found


def _has_control_flow(graph: tf.Graph) -> bool:
    """Looks for loops or branches, which TensorFlow's executor for quick inline functions lacks."""
    definition = graph.as_graph_def()
    nodes = itertools.chain(definition.node, *(function.node_def for function in definition.library.function))
    return any(node.op.removeprefix("Stateless") in ("If", "Case", "While") for node in nodes)


def _check_static_shapes(structure: Any) -> None:
    if not all(spec.shape[1:].is_fully_defined() for spec in tf.nest.flatten(structure)):
        raise UserError(
            f"The strategy needs batches of one shape, but the data gives {structure}, with a length that changes. "
            "Give examples one length: for lines of text, tfdist.TextLines.pad_to_max = True."
        )


def dispose(iterator: Iterator[Any]) -> None:
    """Lets an iterator die on a thread of its own: tearing down a pipeline can take long, and nobody waits for it."""
    threading.Thread(target=lambda held: None, args=(iterator,), daemon=True).start()


def digest_examples(source: Source, batch_size: int) -> str:
    """A digest of all examples where they are at hand as arrays, else of some batches from the first to the last.

    The same examples have the same digest, wherever they lie and whoever reads them.
    Of a stream, which is read from its beginning, the first batch alone counts.
    """
    if (held := source.arrays_in_memory()) is not None:
        return digest_arrays(tf.nest.flatten(held))
    plan = BatchPlan(num_examples=source.num_examples, global_batch_size=batch_size, num_replicas=1)
    last = plan.steps_per_epoch - 1
    steps = (
        {0} if isinstance(source, StreamSource) else {last * i // (SAMPLED_BATCHES - 1) for i in range(SAMPLED_BATCHES)}
    )
    arrays = []
    for step in sorted(steps):
        batch = next(iter(build_pipeline(source, plan, Topology(0, 1, 1), first_step=step)))["examples"]
        arrays += [each.numpy() for each in tf.nest.flatten(batch)]
    return digest_arrays(arrays)


def digest_arrays(arrays: Iterable[np.ndarray]) -> str:
    """32 hexadecimal digits of arrays; of large ones every n-th row counts."""
    digest = hashlib.sha256()
    for each in arrays:
        digest.update(f"{each.dtype} {each.shape}".encode())
        rows = each[:: each.nbytes // SAMPLED_BYTES + 1] if each.ndim else each
        digest.update(repr(rows.tolist()).encode() if each.dtype == object else rows.tobytes())
    return digest.hexdigest()[:32]
