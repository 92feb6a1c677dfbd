"""Real TFRecord files of numbered examples."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.columns import Columns

FEATURES = {"x": tf.io.FixedLenFeature((2,), tf.float32), "number": tf.io.FixedLenFeature((), tf.int64)}
COLUMNS = Columns(inputs="x", targets="number")


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
