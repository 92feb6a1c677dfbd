"""Every source there is, over the same numbered examples: example n is n², where the source leaves numbers, and n.

The last array of a batch says which examples it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from data.squares import EXAMPLES, AtOnce, Squares
from PIL import Image
from pyarrow import csv, parquet
from record_files_support import COLUMNS, FEATURES, example, write_records

from tfdist.data.formats.array_files import ArrayFiles
from tfdist.data.formats.image_folder import ImageFolder
from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.indexed import IndexedSource
from tfdist.data.sources.mixture import Mixture
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import DatasetFunction
from tfdist.data.tables.tables import Table
from tfdist.data.text.text import TextLines
from tfdist.data.text.token_windows import TokenWindows
from tfdist.data.transforms.drawn import MaskedTokens, TwoViews
from tfdist.data.transforms.mixing import CutMix, MixUp

STEPS = 4  # an epoch of batches of 8, the last with 5
NUMBERS = np.arange(EXAMPLES)
SIZES = [2, 11, 0, 7, 9]  # of the files that hold them
XY = Columns(inputs="x", targets="y")
Make = Callable[[], Source]


@dataclasses.dataclass(frozen=True)
class Case:
    """A source and what holds for it.

    Attributes:
      make: from an empty directory to what makes the source.
      has_numbers: the last array of a batch says which examples it holds.
      has_squares: the first array of a batch holds the squares of these numbers.
      shuffles: epochs differ.
      keeps_order: without a seed the examples come in their own order.
      topologies: whether it is read by several workers.
    """

    make: Callable[[pathlib.Path], Make]
    has_numbers: bool = True
    has_squares: bool = True
    shuffles: bool = True
    keeps_order: bool = True
    topologies: bool = True


def arrays() -> dict[str, np.ndarray]:
    return {"x": np.stack([NUMBERS**2.0] * 3, axis=1), "y": NUMBERS.astype(np.int32)}


def npz(folder: pathlib.Path) -> Make:
    np.savez(folder / "a.npz", **arrays())
    return lambda: ArrayFiles(f"{folder}/a.npz", inputs="x", targets="y")


def npy(folder: pathlib.Path) -> Make:
    for name, array in arrays().items():
        np.save(folder / f"{name}.npy", array)
    return lambda: ArrayFiles({name: f"{folder}/{name}.npy" for name in "xy"}, inputs="x", targets="y")


def npz_augmented(folder: pathlib.Path) -> Make:
    np.savez(folder / "a.npz", x=pictures()[0], y=NUMBERS)
    return lambda: ArrayFiles(f"{folder}/a.npz", inputs="x", targets="y", augmentation=[brighter])


def parts() -> Iterator[tuple[int, np.ndarray]]:
    """The numbers of each file."""
    return enumerate(np.split(NUMBERS, np.cumsum(SIZES)[:-1]))


def records(folder: pathlib.Path) -> Make:
    for i, numbers in parts():
        write_records(folder / f"{i}", [example(x=[float(n) ** 2, 0.0], number=int(n)) for n in numbers])
    return lambda: TFRecordSource(files=f"{folder}/*", features=FEATURES, columns=COLUMNS, block_records=3)


def tables(form: str) -> Callable[[pathlib.Path], Make]:
    def make(folder: pathlib.Path) -> Make:
        for i, numbers in parts():
            table, path = pyarrow.table({"x": numbers**2, "y": numbers}), folder / f"{i}.{form}"
            if form == "parquet":
                parquet.write_table(table, path, row_group_size=8)
            elif len(numbers):
                csv.write_csv(table, path)
            else:
                path.touch()  # an empty CSV file has not even a first row
        return lambda: Table(files=f"{folder}/*", columns=XY)

    return make


def lines(bucket_batches: int) -> Callable[[pathlib.Path], Make]:
    def make(folder: pathlib.Path) -> Make:
        for i, numbers in parts():
            (folder / f"{i}.tsv").write_text("".join(f"{n}\tn{n}{' word' * (n * 7 % 11)}\n" for n in numbers))
        files, labels = f"{folder}/*", [str(n) for n in NUMBERS]
        return lambda: TextLines(files=files, fitted_on=files, labels=labels, bucket_batches=bucket_batches)

    return make


def images(folder: pathlib.Path, **settings: Any) -> Make:
    """A gray image a class, whose value is its number."""
    for number in NUMBERS.tolist():
        (folder / f"{number:02}").mkdir()
        image = Image.new("L", (6 + number % 3, 5), number)
        image.save(folder / f"{number:02}" / f"a.{('png', 'bmp')[number % 2]}")
    return lambda: ImageFolder(str(folder), size=(4, 4), channels=1, **settings)


def mixed_images(folder: pathlib.Path) -> Make:
    """Augmented images, labeled 0 … 28, and zeros of a file."""
    np.savez(folder / "x.npz", x=np.zeros((5, 4, 4, 1), np.float32), y=np.full(5, 99, np.int32))
    augmented, zeros = images(folder, augmentation=[brighter]), ArrayFiles(f"{folder}/x.npz", inputs="x", targets="y")
    return lambda: Mixture([augmented, zeros], weights=(3, 1), examples_per_epoch=EXAMPLES)


def brighter() -> keras.layers.Layer:
    return keras.layers.RandomBrightness(0.2)


@functools.cache
def numbered_builder() -> Any:
    """A builder's class, of which TFDS takes one of a name."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class Numbered(tfds.core.GeneratorBasedBuilder):  # type: ignore[name-defined]
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"x": tfds.features.Tensor(shape=(2,), dtype=np.float32), "y": np.int64}
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for n in NUMBERS:
                yield int(n), {"x": np.full(2, n * n, np.float32), "y": n}

    return Numbered


def of_tfds(file_format: str) -> Callable[[pathlib.Path], Make]:
    def make(folder: pathlib.Path) -> Make:
        builder = numbered_builder()(data_dir=folder, file_format=file_format)
        builder.download_and_prepare()
        if file_format == "array_record":
            return lambda: IndexedSource(builder.as_data_source("train"), columns=XY)
        from tfdist.data.formats.tfds_source import load_tfds

        return lambda: load_tfds(name="numbered", split="train", data_dir=str(folder), columns=XY, block_records=3)

    return make


def pair(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(number * number, tf.float32)[tf.newaxis], number


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=3).map(pair)


def by_epoch(epoch: int) -> tf.data.Dataset:
    """Python code that needs a number: NumPy's generator."""
    order = np.random.default_rng(epoch).permutation(EXAMPLES)
    return tf.data.Dataset.from_tensor_slices(order.astype(np.int64)).map(pair).prefetch(2)


def by_seed(seed: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(EXAMPLES).shuffle(7, seed=100 + seed).map(pair)


def generated() -> tf.data.Dataset:
    def generate() -> Iterator[tuple[np.ndarray, int]]:
        for n in range(EXAMPLES):
            yield np.array([n * n], np.float32), n

    signature = (tf.TensorSpec([1], tf.float32), tf.TensorSpec([], tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def pictures() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).random((EXAMPLES, 6, 6, 1), np.float32), NUMBERS % 4


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(2, 30, (EXAMPLES, 40)).astype(np.int32)


def some(count: int) -> Callable[[], Any]:
    """Examples with the squares of numbers, but 0, and the numbers."""
    return lambda: (np.arange(count, dtype=np.float32)[:, np.newaxis] ** 2, np.arange(count))


def fixed(make: Make, **facts: Any) -> Case:
    return Case(lambda folder: make, **facts)


def mixed(make: Make) -> Case:
    return fixed(make, has_numbers=False)


NO_ORDER: dict[str, Any] = {"shuffles": False, "keeps_order": False}
OWN_ORDER: dict[str, Any] = {"keeps_order": False}
CASES: dict[str, Case] = {
    "arrays": fixed(lambda: as_source(tuple(arrays().values()))),
    "npz": Case(npz),
    "npz augmented": Case(npz_augmented, has_squares=False),
    "npy": Case(npy),
    "tfrecord": Case(records),
    "parquet": Case(tables("parquet")),
    "csv": Case(tables("csv")),
    "text": Case(lines(0), has_squares=False),
    "text by length": Case(lines(2), has_squares=False),
    "images": Case(images, has_squares=False),
    "images augmented": Case(lambda folder: images(folder, augmentation=[brighter]), has_squares=False),
    "tokens": mixed(lambda: TokenWindows(lambda: np.arange(EXAMPLES * 3 + 1), length=3)),
    "dicts": fixed(lambda: IndexedSource([{"x": [n * n * 1.0], "y": n, "u": "é"} for n in NUMBERS], columns=XY)),
    "torch style": fixed(lambda: as_source(Squares())),
    "at once": fixed(lambda: as_source(AtOnce())),
    "threads": fixed(lambda: IndexedSource(Squares(), num_threads=3)),
    "processes": fixed(lambda: IndexedSource(Squares(), num_processes=2), topologies=False),  # a copy each
    "tfds tfrecord": Case(of_tfds("tfrecord"), **OWN_ORDER),  # TFDS shuffles as it writes
    "tfds array_record": Case(of_tfds("array_record"), **OWN_ORDER),
    "dataset shuffled": fixed(lambda: DatasetFunction(shuffled), **OWN_ORDER),
    "dataset by epoch": fixed(lambda: DatasetFunction(by_epoch), **OWN_ORDER),
    "dataset by seed": fixed(lambda: DatasetFunction(by_seed), **OWN_ORDER),
    "dataset generated": fixed(lambda: DatasetFunction(generated), **NO_ORDER),
    "mixture": mixed(lambda: Mixture([some(3), some(19), some(7)], weights={0: (5, 1, 2), 1: (1, 2, 0.5)})),
    "mixture of images": Case(mixed_images, has_numbers=False),
    "mixup": mixed(lambda: MixUp(pictures, num_classes=4)),
    "cutmix": mixed(lambda: CutMix(pictures, num_classes=4, alpha=1.0)),
    "views": mixed(lambda: TwoViews(pictures, augmentation=[brighter])),
    "masked": mixed(lambda: MaskedTokens(tokens, mask_token=1, vocabulary_size=30)),
}
