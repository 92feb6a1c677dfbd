"""Data sets on disk for input.py, the same bytes in each call.

Features are random, so nothing is smaller on disk than it looks; images are smooth with some noise, as photographs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

NUM_FILES = 5
SMALL_IMAGE = (28, 28)
PHOTO_SIZE = (160, 160)


def example(features: Mapping[str, bytes | int]) -> bytes:
    """A serialized `tf.train.Example`."""

    def feature(value: bytes | int) -> tf.train.Feature:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    named = {name: feature(value) for name, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()


def write_records(directory: Path, records: list[bytes]) -> list[str]:
    """TFRecord files of unequal sizes; their paths."""
    directory.mkdir(parents=True)
    edges = [len(records) * i * (i + 1) // (NUM_FILES * (NUM_FILES + 1)) for i in range(NUM_FILES + 1)]
    paths = [str(directory / f"part-{i}") for i in range(NUM_FILES)]
    for path, first, end in zip(paths, edges, edges[1:], strict=False):
        with tf.io.TFRecordWriter(path) as writer:
            for record in records[first:end]:
                writer.write(record)
    return paths


def small_images(num_examples: int) -> list[bytes]:
    """Records of raw 28 × 28 gray images, `image`, and a `label`."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (num_examples, *SMALL_IMAGE), dtype=np.uint8)
    return [example({"image": p.tobytes(), "label": i % 10}) for i, p in enumerate(pixels)]


def photos(num_examples: int) -> list[bytes]:
    """PNG files of 160 × 160 pixels in three colors."""
    generator = np.random.default_rng(0)
    height, width = PHOTO_SIZE
    y, x = np.arange(height)[:, np.newaxis, np.newaxis] / height, np.arange(width)[:, np.newaxis] / width
    made = []
    for _ in range(num_examples):
        waves = np.sin(generator.uniform(1, 9, 3) * x + generator.uniform(1, 9, 3) * y + generator.uniform(0, 6, 3))
        noise = generator.normal(0, 4, (height, width, 3))
        made.append(tf.io.encode_png(np.clip(waves * 110 + 128 + noise, 0, 255).astype(np.uint8)).numpy())
    return made
