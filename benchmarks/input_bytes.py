"""One worker's reading of an epoch, as a process of its own, for input.py: how many bytes it asked the system for.

    python input_bytes.py WORKER DIRECTORY OUT.json

DIRECTORY is what `write` left. OUT.json gets {"FORMAT, batch B, N workers": bytes} for each number of workers of which
it can be one. Whatever is imported while reading is imported
before by reading a few examples of another source, and the indices of the files are in the cache.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import input_files
import tensorflow as tf
from measuring import choose_size

from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.order.batches import BatchPlan
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Order, Source

BATCHES = (256, 100)
WORKERS = choose_size((2, 4, 8), (2,))
FORMATS = {"TFRecord": "tfrecord"}
NUM_RECORDS = choose_size(20_011, 2_011)
FEATURES = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}


def write(directory: Path) -> None:
    """Data sets of each format, in files of unequal sizes where the format allows it."""
    records = input_files.small_images(NUM_RECORDS)
    input_files.write_records(directory / "tfrecord", records)


def sources(directory: Path) -> dict[str, Callable[[], Source]]:
    """By format, what makes a source of the files that `write` left."""

    def tfrecord() -> Source:
        columns = Columns(inputs="image", targets="label")
        return TFRecordSource(files=str(directory / "tfrecord" / "*"), features=FEATURES, columns=columns)

    return {"TFRecord": tfrecord}


def total_bytes(directory: Path, format_name: str) -> int:
    """What the files of a format hold."""
    return sum(path.stat().st_size for path in (directory / FORMATS[format_name]).iterdir())


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


def bytes_read() -> int:
    """What this process has asked the system for so far, in whatever way but by mapping files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def main(worker: int, directory: Path, out: Path) -> None:
    found = {}
    for name, make in sources(directory).items():
        read_epoch(make(), BATCHES[0], worker, WORKERS[-1], most=2)  # imports what is missing
        for num_workers, batch in itertools.product((n for n in WORKERS if n > worker), BATCHES):
            source = make()
            before = bytes_read()
            read_epoch(source, batch, worker, num_workers)
            found[f"{name}, batch {batch}, {num_workers} workers"] = bytes_read() - before
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
