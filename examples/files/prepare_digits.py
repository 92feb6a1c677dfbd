#!/usr/bin/env python3
"""Prepares scikit-learn's handwritten digits as files, for the examples and tests that read files.

    python -m tfdist.examples.files.prepare_digits                              # both, below data/
    python -m tfdist.examples.files.prepare_digits --what=tfds --format=array_record --out=DIR

`tfds` makes a real TensorFlow data set "digits" (images uint8 [8, 8, 1], labels) in DIR/tfds, several shards a split;
`tfrecord` makes DIR/tfrecord/digits-{train,test}-*.tfrecord, whose sizes differ. The splits are those of
`tfdist.data.sources.sklearn_sets.load_digits`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tfdist.data.formats.tfds_source import import_tfds
from tfdist.data.sources.sklearn_sets import load_digits

SPLITS = ("train", "test")
NUM_SHARDS = 4


def make_builder() -> type:
    """The builder class of the data set, which TFDS knows as "digits" from then on."""
    tfds = import_tfds()

    class Digits(tfds.core.GeneratorBasedBuilder):  # type: ignore[name-defined]
        """1,797 handwritten digits of 8 × 8 pixels."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            image = tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8)
            label = tfds.features.ClassLabel(num_classes=10)
            return tfds.core.DatasetInfo(
                builder=self,
                description="scikit-learn's handwritten digits",
                features=tfds.features.FeaturesDict({"image": image, "label": label}),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, download_manager: Any) -> dict[str, Iterator[Any]]:
            del download_manager  # they ship with scikit-learn
            return {split: self._generate_examples(split) for split in SPLITS}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
            images, labels = load_digits(split=split)
            pixels = np.round(images * 255).astype(np.uint8)
            for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
                yield number, {"image": image, "label": int(label)}

    return Digits


def prepare_tfds(directory: str, file_format: str, num_shards: int) -> str:
    """Prepares the data set in `directory`, which may then be a `data_dir`; returns its own directory."""
    tfds = import_tfds()
    builder = make_builder()(data_dir=directory, file_format=file_format)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=num_shards))
    return str(builder.data_dir)


def prepare_tfrecords(directory: str, num_files: int) -> list[str]:
    """Writes num_files files a split; each holds one share more of the examples than the one before."""
    os.makedirs(directory, exist_ok=True)
    written = []
    for split in SPLITS:
        images, labels = load_digits(split=split)
        shares = np.arange(1, num_files + 1)
        ends = len(labels) * np.cumsum(shares) // shares.sum()
        for number, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            path = os.path.join(directory, f"digits-{split}-{number:05d}-of-{num_files:05d}.tfrecord")
            with tf.io.TFRecordWriter(path) as writer:
                for image, label in zip(images[begin:end], labels[begin:end], strict=True):
                    writer.write(_serialize(image, label))
            written.append(path)
    return written


def _serialize(image: np.ndarray, label: int) -> bytes:
    pixels = tf.train.Feature(float_list=tf.train.FloatList(value=image.ravel()))
    number = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
    return tf.train.Example(features=tf.train.Features(feature={"image": pixels, "label": number})).SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("tfds", "tfrecord", "both"), default="both")
    parser.add_argument("--out", default="data", help="directory to write below")
    parser.add_argument(
        "--format", choices=("tfrecord", "array_record"), default="tfrecord", help="of the TFDS data set"
    )
    parser.add_argument("--shards", type=int, default=NUM_SHARDS, help="files a split")
    args = parser.parse_args()
    if args.what in ("tfds", "both"):
        print(prepare_tfds(os.path.join(args.out, "tfds"), args.format, args.shards))
    if args.what in ("tfrecord", "both"):
        print(*prepare_tfrecords(os.path.join(args.out, "tfrecord"), args.shards), sep="\n")


if __name__ == "__main__":
    main()
