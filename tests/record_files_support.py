"""Real TFRecord files of numbered examples, and what an epoch of a source over them holds."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.order.batches import BatchPlan
from tfdist.data.pipeline.pipeline import build_pipeline
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Source
from tfdist.strategies.base import Topology

FEATURES = {"x": ("fixed", (2,), "float32"), "number": ("fixed", (), "int64")}
COLUMNS = Columns(inputs="x", targets="number")
UNEQUAL_SIZES = ([37], [50, 3], [1, 90, 12], [20, 0, 41, 8], [5, 64, 0, 17, 33])


def example(**features: Any) -> bytes:
    """A serialized tf.train.Example; ints, floats and bytes, alone or in lists."""
    made = {}
    for name, value in features.items():
        values = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]
        match values[0] if values else None:
            case None:
                made[name] = tf.train.Feature()
            case bytes():
                made[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
            case float():
                made[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
            case _:
                made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()


def write_records(path: pathlib.Path, records: Sequence[bytes]) -> pathlib.Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def write_numbered(folder: pathlib.Path, sizes: Sequence[int], padding: int = 0) -> str:
    """Files of the given numbers of records, numbered through; returns their pattern."""
    number = 0
    for file, size in enumerate(sizes):
        records = [example(number=n, x=[float(n), n / 2], padding=bytes(padding)) for n in range(number, number + size)]
        write_records(folder / f"part-{file:03d}", records)
        number += size
    return str(folder / "part-*")


def global_batches(source: Source, plan: BatchPlan, num_workers: int, *, steps: int, first_step: int = 0) -> list[Any]:
    """The targets of each global batch, from the streams of as many workers."""
    streams = [
        build_pipeline(source, plan, Topology(worker, num_workers, 1), first_step=first_step).as_numpy_iterator()
        for worker in range(num_workers)
    ]
    batches = []
    for _ in range(steps):
        pieces = [next(stream) for stream in streams]
        for piece in pieces:
            x, number = piece["examples"]
            np.testing.assert_array_equal(x[:, 0], number.astype(np.float32))
        kept = [piece["examples"][1] for piece in pieces]
        if "shares" in pieces[0] and (pieces[0]["shares"] < 1).any():  # fewer examples than replicas: each has all
            kept = kept[:1]
        batches.append(np.concatenate(kept).tolist())
    return batches
