"""What the input pipeline costs beside hand-tuned tf.data, what a worker reads, and what resuming takes.

Bytes are counted by the system in worker processes that read an epoch one after another. Speeds are examples/s of
iterators that have been running for a while, ours and the peer's in turn; a peer with settings is the best of several,
found in the call. Takes some five minutes on two cores.

    python benchmarks/input.py [--json=FILE] [--part=PART]
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples

from tfdist.data.batches import BatchPlan
from tfdist.data.formats.image_folder import ImageFolder
from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.pipeline import build_pipeline, dispose
from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Order, Source
from tfdist.strategies.strategy import Topology

PARTS = ("memory", "records", "photo_records", "photo_folder", "first_batch", "bytes_per_worker")
ALONE = Topology(worker_index=0, num_workers=1, num_local_replicas=1)
NUM_FILES = 5
SMALL_IMAGE = (28, 28)
PHOTO_SIZE = (160, 160)
EPOCH_BATCHES = (256, 100)  # of workers whose bytes are counted
WORKERS = choose_size((2, 4, 8), (2,))
NUM_RECORDS = choose_size(20_011, 2_011)
NUM_IMAGES = choose_size(60_000, 512)
NUM_PHOTOS = choose_size(1_000, 16)
RESIZED = (96, 96)
BATCH = choose_size(256, 64)
PHOTO_BATCH = choose_size(64, 8)
SHUFFLE_BUFFER = 10_000  # records
WARM_BATCHES = choose_size(20, 1)
SAMPLE_SECONDS = choose_size(0.4, 0.01)
ROUNDS = 9
STEP = 1_000_000
FIRST_BATCH_ROUNDS = 15
AUTO = tf.data.AUTOTUNE
FEATURES = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}
PIXELS = {"image": lambda image: tf.reshape(tf.io.decode_raw(image, tf.uint8), [-1, *SMALL_IMAGE])}
COLUMNS = Columns(inputs="image", targets="label")

Parsed = tuple[tf.Tensor, tf.Tensor]


def measure(parts: Sequence[str]) -> Iterator[list[Figure]]:
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
            yield measure_part("input", part, scratch)


def memory(scratch: str) -> list[Figure]:
    """Images in memory, against a full shuffle of single ones."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, NUM_IMAGES, dtype=np.int32)
    figures = []
    for kind in ("float32", "uint8"):
        images = generator.integers(0, 256, (NUM_IMAGES, *SMALL_IMAGE), dtype=np.uint8).astype(kind)
        peer = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(NUM_IMAGES).repeat()
        peer = peer.batch(BATCH).prefetch(AUTO)
        name = f"in memory, {kind}: examples/s ÷ from_tensor_slices → shuffle → batch → prefetch"
        figures.append(
            compare_with_best(name, build_own(ArraySource((images, labels)), BATCH), [peer], BATCH, goal=2.5)
        )
    return figures


def records(scratch: str) -> list[Figure]:
    """Small TFRecords, against `interleave` with several settings."""
    paths = write_records(Path(scratch) / "records", make_small_images(NUM_IMAGES))
    source = TFRecordSource(files=paths, features=FEATURES, columns=COLUMNS, transforms=PIXELS)

    def parse(serialized: tf.Tensor) -> Parsed:
        parsed = tf.io.parse_example(serialized, FEATURES)
        pixels = tf.io.decode_raw(parsed["image"], tf.uint8)
        return tf.reshape(pixels, [-1, *SMALL_IMAGE]), parsed["label"]

    def peer(cycle: int, calls: int | None, block: int) -> tf.data.Dataset:
        shuffled = interleave_records(paths, cycle, calls, block)
        return shuffled.batch(BATCH).map(parse, num_parallel_calls=calls).prefetch(AUTO)

    settings = itertools.product((2, len(paths)), (None, 2, AUTO), (1, 16))
    peers = [peer(*setting) for setting in settings]
    name = "TFRecord: examples/s ÷ the best of 12 hand-tuned interleaves"
    return [compare_with_best(name, build_own(source, BATCH), peers, BATCH, goal=0.95)]


def photo_records(scratch: str) -> list[Figure]:
    """PNG files in TFRecords, decoded and resized, against maps with several settings."""
    records = [serialize_example({"image": photo, "label": i % 10}) for i, photo in enumerate(make_photos(NUM_PHOTOS))]
    paths = write_records(Path(scratch) / "records", records)

    def one(serialized: tf.Tensor) -> Parsed:
        parsed = tf.io.parse_single_example(serialized, FEATURES)
        return _resize(tf.image.decode_png(parsed["image"], 3)), parsed["label"]

    def decoded_together(serialized: tf.Tensor) -> Parsed:
        parsed = tf.io.parse_example(serialized, FEATURES)
        return _resize(decode_photos(parsed["image"])), parsed["label"]

    def singly(calls: int, cycle: int) -> tf.data.Dataset:
        shuffled = interleave_records(paths, cycle, None, 1)
        return shuffled.map(one, num_parallel_calls=calls).batch(PHOTO_BATCH).prefetch(AUTO)

    def together(calls: int, cycle: int) -> tf.data.Dataset:
        shuffled = interleave_records(paths, cycle, None, 1)
        return shuffled.batch(PHOTO_BATCH).map(decoded_together, num_parallel_calls=calls).prefetch(AUTO)

    peers = [build(calls, len(paths)) for build in (singly, together) for calls in (2, 4, AUTO)]
    source = TFRecordSource(
        files=paths, features=FEATURES, columns=COLUMNS, transforms={"image": lambda x: _resize(decode_photos(x))}
    )
    name = "PNG records, decoded and resized: examples/s ÷ the best of 6 hand-tuned maps"
    return [compare_with_best(name, build_own(source, PHOTO_BATCH), peers, PHOTO_BATCH, goal=0.95)]


def photo_folder(scratch: str) -> list[Figure]:
    """PNG files in folders, decoded and resized, against maps with several settings."""
    for i, photo in enumerate(make_photos(NUM_PHOTOS)):
        (Path(scratch) / str(i % 10)).mkdir(exist_ok=True)
        (Path(scratch) / str(i % 10) / f"{i}.png").write_bytes(photo)
    paths = sorted(str(path) for path in Path(scratch).glob("*/*.png"))
    labels = [int(Path(path).parent.name) for path in paths]

    def one(path: tf.Tensor, label: tf.Tensor) -> Parsed:
        return _resize(tf.image.decode_png(tf.io.read_file(path), 3)) / 255.0, label

    def peer(calls: int) -> tf.data.Dataset:
        shuffled = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths)).repeat()
        return shuffled.map(one, num_parallel_calls=calls).batch(PHOTO_BATCH).prefetch(AUTO)

    source = ImageFolder(scratch, size=RESIZED)
    name = "folder of PNG, decoded and resized: examples/s ÷ the best of 4 hand-tuned maps"
    peers = [peer(calls) for calls in (2, 4, 8, AUTO)]
    return [compare_with_best(name, build_own(source, PHOTO_BATCH), peers, PHOTO_BATCH, goal=0.95)]


def decode_photos(images: tf.Tensor) -> tf.Tensor:
    spec = tf.TensorSpec([*PHOTO_SIZE, 3], tf.uint8)
    return tf.map_fn(
        lambda png: tf.ensure_shape(tf.image.decode_png(png, 3), spec.shape), images, fn_output_signature=spec
    )


def _resize(images: tf.Tensor) -> tf.Tensor:
    return tf.image.resize(images, RESIZED, antialias=True)


def first_batch(scratch: str) -> list[Figure]:
    """From building the pipeline to the first batch, at a late step and at the first."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (NUM_IMAGES, *SMALL_IMAGE), dtype=np.uint8)
    arrays = ArraySource((images, np.arange(NUM_IMAGES)))
    paths = write_records(Path(scratch) / "records", make_small_images(NUM_IMAGES))
    records = TFRecordSource(files=paths, features=FEATURES, columns=COLUMNS, transforms=PIXELS)
    return [_time_first_batch("arrays", arrays), _time_first_batch("TFRecord", records)]


def _time_first_batch(what: str, source: Source) -> Figure:
    held = []

    def seconds(first_step: int) -> float:
        started = time.perf_counter()
        iterator = iter(build_own(source, BATCH, first_step))
        next(iterator)
        held.append(iterator)  # taking it down is not counted
        return time.perf_counter() - started

    seconds(0)  # imports and caches
    late, early = take_samples([lambda: seconds(STEP), lambda: seconds(0)], FIRST_BATCH_ROUNDS)
    for iterator in held:
        dispose(iterator)
    name = f"{what}: time to the first batch at step 1,000,000 ÷ at step 0"
    return dataclasses.replace(make_ratio(name, late, early, 1.1), unit="s", at_most=True)


def bytes_per_worker(scratch: str) -> list[Figure]:
    """Bytes that the workers of 2, 4 and 8 read of an epoch of TFRecords, the worker with the largest part."""
    directory = Path(scratch) / "data"
    paths = write_records(directory, make_small_images(NUM_RECORDS))
    total = sum(os.path.getsize(path) for path in paths)
    environment = {**os.environ, "XDG_CACHE_HOME": str(Path(scratch) / "cache")}

    def read_by(worker: int) -> dict[str, int]:
        command = [sys.executable, __file__, "count_bytes", str(worker), str(directory)]
        printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(printed.splitlines()[-1])

    counts = [read_by(0)]  # which leaves the indices of the files in the cache
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        counts += pool.map(read_by, range(1, WORKERS[-1]))
    found = {name: [count[name] for count in counts if name in count] for name in counts[0]}
    return [_make_bytes_figure(f"TFRecord, {name}", read, total) for name, read in found.items()]


def _make_bytes_figure(name: str, read: list[int], total: int) -> Figure:
    if sum(read) < 0.95 * total:
        sys.exit(f"{name}: the workers read {sum(read):,} of {total:,} bytes; the system's counter does not see all.")
    ratios = sorted(count * len(read) / total for count in read)
    # Where the workers do not divide the batch, some have more of it than others, and more to read.
    is_even = not int(name.split("batch ")[1].split(",")[0]) % len(read)
    return Figure(
        f"{name}: bytes read by a worker ÷ (total ÷ workers), the largest",
        value=ratios[-1],
        goal=1.02 if is_even else None,
        quartiles=(ratios[0], ratios[-1]),
        ours=max(read),
        peer=total / len(read),
        unit="bytes",
        at_most=True,
    )


def interleave_records(paths: list[str], cycle: int, calls: int | None, block: int) -> tf.data.Dataset:
    """Shuffled records without end, as one writes them by hand."""
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    read = files.interleave(
        tf.data.TFRecordDataset,
        cycle_length=cycle,
        block_length=block,
        num_parallel_calls=calls,
        deterministic=None if calls is None else False,
    )
    return read.shuffle(SHUFFLE_BUFFER).repeat()


def build_own(source: Source, batch: int, first_step: int = 0) -> tf.data.Dataset:
    """tfdist's pipeline on one worker."""
    plan = BatchPlan(
        num_examples=source.num_examples, global_batch_size=batch, num_replicas=1, shuffle_seed=0, drop_remainder=True
    )
    return build_pipeline(source, plan, ALONE, first_step=first_step)


def compare_with_best(
    name: str, dataset: tf.data.Dataset, peers: list[tf.data.Dataset], batch: int, *, goal: float
) -> Figure:
    """examples/s of `dataset` ÷ those of the best of the peers, which is found first by a sample or two of each."""
    drawn = Drawn(dataset, batch)
    if len(peers) > 1:
        rates = []
        for peer in peers:
            candidate = Drawn(peer, batch)
            rates.append(statistics.median(candidate.sample() for _ in range(3)))
            candidate.end()
        peers = [peers[int(np.argmax(rates))]]
    best = Drawn(peers[0], batch)
    mine, theirs = take_samples([drawn.sample, best.sample], ROUNDS)
    drawn.end(), best.end()
    return dataclasses.replace(make_ratio(name, mine, theirs, goal), unit="examples/s")


class Drawn:
    """An iterator that is drawn from; what fills its buffers is not counted, nor what taking it down costs."""

    def __init__(self, dataset: tf.data.Dataset, batch: int) -> None:
        self._iterator: Iterator[Any] | None = iter(dataset)
        self._batch = batch
        self._steps = tf.function(self._draw, autograph=False)
        self.sample()

    def sample(self) -> float:
        """Examples a second."""
        self._steps(self._iterator, tf.constant(WARM_BATCHES))
        num_batches, started = 0, time.perf_counter()
        while time.perf_counter() - started < SAMPLE_SECONDS:
            self._steps(self._iterator, tf.constant(5))
            num_batches += 5
        return num_batches * self._batch / (time.perf_counter() - started)

    def end(self) -> None:
        iterator, self._iterator = self._iterator, None
        dispose(iterator)

    @staticmethod
    def _draw(iterator: Iterator[Any], num_batches: tf.Tensor) -> tf.Tensor:
        """Takes batches inside one function, as a training loop does."""

        def body(i: tf.Tensor, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, size + tf.size(tf.nest.flatten(next(iterator))[0])

        zero = tf.constant(0)
        return tf.while_loop(lambda i, _: i < num_batches, body, [zero, zero], parallel_iterations=1)[1]


def open_source(directory: Path) -> Source:
    return TFRecordSource(files=str(directory / "*"), features=FEATURES, columns=COLUMNS)


def read_epoch(source: Source, batch: int, worker: int, num_workers: int, most: int | None = None) -> None:
    """Reads what the worker needs of the first epoch, as the pipeline does, which would continue into the second."""
    plan = BatchPlan(
        num_examples=source.num_examples, global_batch_size=batch, num_replicas=num_workers, shuffle_seed=0
    )
    read = source.reader(Order(batch_size=batch, seed=0))

    def local_batch(step: tf.Tensor) -> None:
        piece = plan.replica_slice(step, tf.constant(worker, tf.int64))
        return read(piece["positions"], piece["epoch"])

    for _ in tf.data.Dataset.range(most or plan.steps_per_epoch).map(local_batch, num_parallel_calls=4):
        pass


def count_bytes_read() -> int:
    """What this process has asked the system for so far, in whatever way but by mapping files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def count_bytes(worker: int, directory: Path) -> None:
    """Prints, for each number of workers of which it can be one, how many bytes it asks the system for in an epoch.

    Whatever is imported while reading is imported before, by reading a few examples of another source.
    """
    found = {}
    read_epoch(open_source(directory), EPOCH_BATCHES[0], worker, WORKERS[-1], most=2)  # imports what is missing
    for num_workers, batch in itertools.product((n for n in WORKERS if n > worker), EPOCH_BATCHES):
        source = open_source(directory)
        before = count_bytes_read()
        read_epoch(source, batch, worker, num_workers)
        found[f"batch {batch}, {num_workers} workers"] = count_bytes_read() - before
    print(json.dumps(found), flush=True)


def serialize_example(features: Mapping[str, bytes | int]) -> bytes:
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


def make_small_images(num_examples: int) -> list[bytes]:
    """Records of raw 28 × 28 gray images, `image`, and a `label`."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (num_examples, *SMALL_IMAGE), dtype=np.uint8)
    return [serialize_example({"image": p.tobytes(), "label": i % 10}) for i, p in enumerate(pixels)]


def make_photos(num_examples: int) -> list[bytes]:
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


if __name__ == "__main__" and "count_bytes" in sys.argv:
    count_bytes(int(sys.argv[2]), Path(sys.argv[3]))
elif __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
