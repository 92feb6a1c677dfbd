"""One worker's reading of an epoch, as a process of its own, for input.py: how many bytes it asked the system for.

    python input_bytes.py WORKER DIRECTORY OUT.json

DIRECTORY has TFRecord files of unequal sizes. OUT.json gets {"batch B, N workers": bytes} for each number of workers of
which it can be one. Whatever is imported while reading is imported before by reading a few examples of another source,
and the indices of the files are in the cache.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import tensorflow as tf
from measuring import choose_size

from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.order.batches import BatchPlan
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Order, Source

BATCHES = (256, 100)
WORKERS = choose_size((2, 4, 8), (2,))
NUM_RECORDS = choose_size(20_011, 2_011)
FEATURES = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}


def open_source(directory: Path) -> Source:
    columns = Columns(inputs="image", targets="label")
    return TFRecordSource(files=str(directory / "*"), features=FEATURES, columns=columns)


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
    read_epoch(open_source(directory), BATCHES[0], worker, WORKERS[-1], most=2)  # imports what is missing
    for num_workers, batch in itertools.product((n for n in WORKERS if n > worker), BATCHES):
        source = open_source(directory)
        before = bytes_read()
        read_epoch(source, batch, worker, num_workers)
        found[f"batch {batch}, {num_workers} workers"] = bytes_read() - before
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
