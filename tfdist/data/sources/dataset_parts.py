"""What a `tf.data.Dataset` is built of: files, shards, randomness, batches. Read from its graph, without an example.

Invariant: what is not recognized counts as not there. Used by `user_dataset.py` to choose a policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "CSVDataset", "SSTableDataset")
_RANDOM_DATASETS = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset", "RandomSeedGenerator")
_RANDOM_OPS = (
    "RandomUniform",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomShuffle",
    "Multinomial",
    "RandomGamma",
)
_BATCHES = ("BatchDataset", "PaddedBatchDataset", "MapAndBatchDataset", "DenseToRaggedBatchDataset")
_UNBATCHES = ("UnbatchDataset", "FlatMapDataset", "InterleaveDataset", "ParallelInterleaveDataset", "WindowDataset")


@dataclasses.dataclass(frozen=True)
class Parts:
    """What was found.

    Attributes:
      num_files: files that it reads, where they can be told apart; 0 for none.
      is_sharded: it holds `Dataset.shard`.
      is_random: it shuffles or draws.
      unseeded: what draws without a seed, for a message; None if nothing does.
      is_batched: its elements are batches.
      batch_size: examples of a full one, where that is known without reading.
    """

    num_files: int
    is_sharded: bool
    is_random: bool
    unseeded: str | None
    is_batched: bool
    batch_size: int | None


def parts_of(dataset: tf.data.Dataset) -> Parts:
    """Looks through a dataset, its inputs and the functions that it maps."""
    datasets = list(_with_inputs(dataset))
    ops = [op for each in datasets for op in _operations(each)]
    unseeded = [said for each in datasets if (said := _unseeded_dataset(each))]
    unseeded += [op.type for op in ops if op.type in _RANDOM_OPS and not (_seed(op, "seed") or _seed(op, "seed2"))]
    names = [_name(each) for each in datasets]
    return Parts(
        num_files=_num_files(datasets, ops),
        is_sharded=any(name == "ShardDataset" for name in names) or any(op.type == "ShardDataset" for op in ops),
        is_random=bool(unseeded)
        or any(name in _RANDOM_DATASETS for name in names)
        or any(op.type in _RANDOM_OPS or op.type.startswith("ShuffleDataset") for op in ops),
        unseeded=unseeded[0] if unseeded else None,
        is_batched=_is_batched(dataset),
        batch_size=_batch_size(dataset),
    )


def unseeded_in_both(a: tf.data.Dataset, b: tf.data.Dataset) -> str | None:
    """What draws without a seed in the datasets that two are built of in common, for a message; None: nothing does.

    Of a function's two results it is what the function did not make anew.
    """
    of_b = {id(each) for each in _with_inputs(b)}
    found = (parts_of(each).unseeded for each in _with_inputs(a) if id(each) in of_b)
    return next(filter(None, found), None)


def _with_inputs(dataset: Any) -> Iterator[Any]:
    yield dataset
    names = getattr(dataset, "_filenames", None)  # which not every reader counts among its inputs
    for each in [*dataset._inputs(), *([names] if isinstance(names, tf.data.Dataset) else [])]:
        yield from _with_inputs(each)


def _name(dataset: Any) -> str:
    """The class without TensorFlow's `_` and version: `_ShuffleDataset`, `TFRecordDatasetV2`."""
    name = type(dataset).__name__.lstrip("_")
    for version in ("V1", "V2", "V3", "V4"):
        name = name.removesuffix(version)
    return name.replace("ParallelBatch", "Batch").replace("ParallelMap", "Map")


def _operations(dataset: Any) -> Iterator[tf.Operation]:
    """Operations of the function that a dataset maps, and of the functions that those call."""
    mapped = getattr(dataset, "_map_func", None)
    if mapped is None:
        return
    graphs, seen = [mapped.function.graph], set()
    while graphs:
        graph = graphs.pop()
        yield from graph.get_operations()
        for name, function in getattr(graph, "_functions", {}).items():
            inner = getattr(function, "graph", None)
            if inner is not None and name not in seen:
                seen.add(name)
                graphs.append(inner)


def _num_files(datasets: list[Any], ops: list[tf.Operation]) -> int:
    if not any(_name(each) in _READERS for each in datasets) and not any(op.type.startswith(_READERS) for op in ops):
        return 0
    slices = [tensor for each in datasets if _name(each) == "TensorSliceDataset" for tensor in each._tensors]
    return max((int(np.prod(tensor.shape)) for tensor in slices if tensor.dtype == tf.string), default=0)


def _unseeded_dataset(dataset: Any) -> str | None:
    if _name(dataset) not in _RANDOM_DATASETS:
        return None
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    values = [tf.get_static_value(seed) for seed in seeds if seed is not None]
    return f"Dataset.{_name(dataset).removesuffix('Dataset').lower()}" if values and not any(values) else None


def _seed(op: tf.Operation, name: str) -> int:
    try:
        return op.get_attr(name)
    except ValueError:
        return 0


def _is_batched(dataset: Any) -> bool:
    name = _name(dataset)
    if name in _BATCHES:
        return True
    if name in _UNBATCHES:
        return False
    inputs = dataset._inputs()
    return bool(inputs) and name not in ("ZipDataset", "ConcatenateDataset") and _is_batched(inputs[0])


def _batch_size(dataset: Any) -> int | None:
    """Of the last `Dataset.batch`; None where there is none, or something took its batches apart."""
    name = _name(dataset)
    if name in _UNBATCHES:
        return None
    if name in _BATCHES:
        size = tf.get_static_value(getattr(dataset, "_batch_size", None))
        return None if size is None else int(size)
    inputs = dataset._inputs()
    return _batch_size(inputs[0]) if inputs else None
