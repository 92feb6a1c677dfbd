"""What a `tf.data.Dataset` is built of: randomness, batches. Read from its graph, without an example.

Invariant: what is not recognized counts as not there. Used by `user_dataset.py` and `keras_fit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

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
      is_random: it shuffles or draws.
      is_batched: its elements are batches.
      batch_size: examples of a full one, where that is known without reading.
    """

    is_random: bool
    is_batched: bool
    batch_size: int | None


def parts_of(dataset: tf.data.Dataset) -> Parts:
    """Looks through a dataset, its inputs and the functions that it maps."""
    datasets = list(_with_inputs(dataset))
    ops = {op.type for each in datasets for op in _operations(each)}
    return Parts(
        is_random=any(_name(each) in _RANDOM_DATASETS for each in datasets)
        or any(op in _RANDOM_OPS or op.startswith("ShuffleDataset") for op in ops),
        is_batched=_is_batched(dataset),
        batch_size=_batch_size(dataset),
    )


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
