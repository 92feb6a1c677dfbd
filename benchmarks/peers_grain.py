"""Batches by grain, which peer.py asks for samples: `python peers_grain.py KIND DIRECTORY BATCH THREADS WORKERS`.

KIND: png for records of ArrayRecord, a byte that is the class and a PNG file, decoded by OpenCV; parquet for rows of
Parquet files, shuffled within a window; memory for arrays. Read by so many threads, or by worker processes with so many
each; 0 is none. For a number it draws so many batches. Tells what is in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import grain
import jax
import numpy as np
from absl import app
from grain import experimental
from peer import describe_arrays, serve, time_steps

SHUFFLE_WINDOW = 10_000  # rows
BUFFERED_BATCHES = 4  # in each process; all of them are fewer than what is drawn before a sample


def decode(record: bytes) -> tuple[np.ndarray, np.ndarray]:
    image = cv2.imdecode(np.frombuffer(record, np.uint8, offset=1), cv2.IMREAD_COLOR_RGB)
    return image, np.int32(record[0])


class Rows:
    """Arrays as grain reads them, example by example."""

    def __init__(self, directory: Path) -> None:
        self._arrays = np.load(directory / "x.npy"), np.load(directory / "y.npy")

    def __len__(self) -> int:
        return len(self._arrays[1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(array[index] for array in self._arrays)


def read_by_position(
    source: Any, batch: int, threads: int, change: Callable[[Any], Any] | None = None
) -> grain.IterDataset:
    examples = grain.MapDataset.source(source).shuffle(seed=0).repeat()
    batches = (examples.map(change) if change else examples).batch(batch)
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=BUFFERED_BATCHES))


def png(directory: Path, batch: int, threads: int) -> grain.IterDataset:
    return read_by_position(grain.sources.ArrayRecordDataSource(str(directory / "records")), batch, threads, decode)


def memory(directory: Path, batch: int, threads: int) -> grain.IterDataset:
    return read_by_position(Rows(directory), batch, threads)


def parquet(directory: Path, batch: int, threads: int) -> grain.IterDataset:
    rows = experimental.ParquetIterDataset(sorted(map(str, directory.glob("*.parquet"))))
    shuffled = experimental.WindowShuffleIterDataset(rows, window_size=SHUFFLE_WINDOW, seed=0)
    batches = experimental.RepeatIterDataset(shuffled).batch(batch)
    if not threads:
        return batches
    return experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=BUFFERED_BATCHES)


def main(kind: str, directory: str, batch: str, threads: str, workers: str) -> None:
    build = {"png": png, "memory": memory, "parquet": parquet}[kind]
    batches = build(Path(directory), int(batch), int(threads))
    if int(workers):
        options = grain.MultiprocessingOptions(num_workers=int(workers))
        batches = batches.mp_prefetch(options)
    iterator = iter(batches)
    first = next(iterator)

    def draw(num_batches: int) -> None:
        for _ in range(num_batches):
            next(iterator)

    serve(time_steps(draw), describe_arrays(jax.tree.leaves(first)))


if __name__ == "__main__":
    app.run(lambda argv: main(*argv[1:]))  # grain's worker processes read flags
