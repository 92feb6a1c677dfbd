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
import numpy as np
import tensorflow as tf
from measuring import choose_size

from tfdist.data.formats.array_record import ArrayRecordSource
from tfdist.data.formats.tfrecord import TFRecordSource
from tfdist.data.order.batches import BatchPlan
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Order, Source
from tfdist.data.tables.tables import Table

BATCHES = (256, 100)
WORKERS = choose_size((2, 4, 8), (2,))
FORMATS = {"TFRecord": "tfrecord", "Parquet": "parquet", "ArrayRecord": "array_record"}
NUM_RECORDS = choose_size(20_011, 2_011)
GROUP_ROWS, NUM_GROUPS, NUM_COLUMNS = 1024, choose_size(128, 4), 8
FEATURES = {"image": ("raw", input_files.SMALL_IMAGE, "uint8"), "label": ("fixed", (), "int64")}
NAMES = [f"c{i}" for i in range(NUM_COLUMNS)]


def write(directory: Path) -> None:
    """Data sets of each format, in files of unequal sizes where the format allows it."""
    import pyarrow
    from array_record.python.array_record_module import ArrayRecordWriter
    from pyarrow import parquet

    generator = np.random.default_rng(0)
    records = input_files.small_images(NUM_RECORDS)
    input_files.write_records(directory / "tfrecord", records)
    (directory / "array_record").mkdir()
    writer = ArrayRecordWriter(str(directory / "array_record" / "part-0"), "group_size:1")  # as TFDS writes them
    for record in records:
        writer.write(record)
    writer.close()
    (directory / "parquet").mkdir()
    numbers = generator.standard_normal((GROUP_ROWS * NUM_GROUPS, NUM_COLUMNS), dtype=np.float32)
    table = pyarrow.table({name: numbers[:, i] for i, name in enumerate(NAMES)})
    parquet.write_table(table, directory / "parquet" / "part-0.parquet", row_group_size=GROUP_ROWS)


def sources(directory: Path) -> dict[str, Callable[[], Source]]:
    """By format, what makes a source of the files that `write` left."""

    def decode(strings: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return strings, strings

    def table() -> Source:
        return Table(files=str(directory / "parquet" / "*"), columns=Columns(inputs=NAMES[1:], targets=NAMES[0]))

    def array_record() -> Source:
        spec = tf.TensorSpec([None], tf.string)
        path = str(directory / "array_record" / "part-0")
        record_bytes = Path(path).stat().st_size / NUM_RECORDS
        return ArrayRecordSource([(path, 0, NUM_RECORDS)], decode, (spec, spec), record_bytes=record_bytes)

    def tfrecord() -> Source:
        columns = Columns(inputs="image", targets="label")
        return TFRecordSource(files=str(directory / "tfrecord" / "*"), features=FEATURES, columns=columns)

    return {"TFRecord": tfrecord, "Parquet": table, "ArrayRecord": array_record}


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
