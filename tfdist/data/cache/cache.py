"""Keeps the examples of another source, as they are once read and decoded, in memory or on a local disk.

Invariant: batches are the same, bit for bit, with the cache as without. An example is kept when it is first read, by
whichever worker of the machine that is, and read from the cache by all of them from then on; what is random about it
is drawn afterwards. Nothing is read ahead of time.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.cache.example_store import ExampleStore, Row, check_room, hold, row_bytes
from tfdist.data.pipeline.failures import noted
from tfdist.data.pipeline.pipeline import as_source
from tfdist.data.sources.source import Order, Reader, Source
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.errors import UserError
from tfdist.storage.memory import available_bytes
from tfdist.strategies.cluster import environment

PLACES = ("memory", "disk")
SHARED_MEMORY = pathlib.Path("/dev/shm")
MEMORY_SHARE = 0.8  # of what is free, at most
_log = logging.getLogger(__name__)


class Cached(Source):
    """The examples of `data`, read once. In a gin file:

        TRAIN_DATA = @cache.Cached
        cache.Cached.data = @train/tfrecord.TFRecordSource
        cache.Cached.where = 'disk'

    Args:
      data: a data function or source of examples of fixed shapes, or lines of text.
      where: "memory": shared memory of the machine, given back when the last worker ends; where that has no room,
        memory of each worker. "disk": `directory`, where later runs find it, too.
      directory: on a local disk; None takes the user's cache directory.

    Raises:
      UserError: the data cannot be kept, or the place is none.
    """

    calls_python = True

    def __init__(
        self, data: Callable[[], Any] | Source, *, where: str = "memory", directory: str | None = None
    ) -> None:
        if where not in PLACES:
            raise UserError(f"Cached.where is one of {', '.join(PLACES)}; received {where!r}.")
        if directory is not None and (where != "disk" or "://" in directory):
            raise UserError(
                f"Cached.directory is a local directory, for Cached.where = 'disk'; received {directory!r} and "
                f"where = {where!r}."
            )
        self.source = data if isinstance(data, Source) else as_source(data() if callable(data) else data)
        if isinstance(self.source, StreamSource):
            raise UserError("Cached keeps examples by their number. A tf.data.Dataset has its own Dataset.cache().")
        self._where = where
        self._directory = directory
        self.num_examples = self.source.num_examples
        self.structure = self.source.structure
        self.augment = self.source.augment
        self._kept = tf.nest.map_structure(lambda spec: spec, self.source.kept_structure)
        _check(self._kept, self.source.lengths)

    def prepare(self, directory: str) -> None:
        self.source.prepare(directory)

    def reader(self, order: Order) -> Reader:
        source, store = self.source, self._store
        read, numbers_at = source.kept_reader(order), source.numbers(order)
        specs = tf.nest.flatten(self._kept)
        width = _widths(source, order)

        def take(numbers: np.ndarray, positions: np.ndarray, epoch: np.ndarray) -> list[np.ndarray]:
            rows = store.take(numbers)
            if width is None:
                return rows
            longest = width(int(positions[0]) // order.batch_size, int(epoch))
            return [_cut(part, spec, longest) for part, spec in zip(rows, specs, strict=True)]

        def put(numbers: np.ndarray, *parts: np.ndarray) -> np.bool_:
            store.put(numbers, parts)
            return np.True_

        has, take, put = noted(lambda numbers: np.bool_(store.has(numbers))), noted(take), noted(put)

        def read_and_keep(positions: tf.Tensor, epoch: tf.Tensor, numbers: tf.Tensor) -> list[tf.Tensor]:
            parts = tf.nest.flatten(read(positions, epoch))
            kept = tf.numpy_function(put, [numbers, *parts], tf.bool)
            with tf.control_dependencies([kept]):
                return [tf.identity(part) for part in parts]

        def read_cached(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            numbers = numbers_at(positions, epoch)
            parts = tf.cond(
                tf.ensure_shape(tf.numpy_function(has, [numbers], tf.bool), []),
                lambda: list(tf.numpy_function(take, [numbers, positions, epoch], [spec.dtype for spec in specs])),
                lambda: read_and_keep(positions, epoch, numbers),
            )
            shaped = [tf.ensure_shape(part, spec.shape) for part, spec in zip(parts, specs, strict=True)]
            nest = tf.nest.pack_sequence_as(self._kept, shaped)
            return source.from_kept(nest, augments=order.seed is not None)

        return read_cached

    def describe(self) -> list[str]:
        place = "the machine's shared memory" if self._where == "memory" else self._base()
        return [
            f"cached in {place}: {row_bytes(self._rows) * self.num_examples:,} bytes when all is read",
            *self.source.describe(),
        ]

    @functools.cached_property
    def _rows(self) -> list[Row]:
        longest = 0 if self.source.lengths is None else max(1, int(self.source.lengths.max()))
        return [
            (tuple(longest if size is None else size for size in spec.shape[1:]), np.dtype(spec.dtype.as_numpy_dtype))
            for spec in tf.nest.flatten(self._kept)
        ]

    @functools.cached_property
    def _store(self) -> ExampleStore:
        """Opened when the first pipeline is built: what a source is, is known only once it is prepared."""
        directory = self._base() / self.source.identity()
        num_bytes = row_bytes(self._rows) * self.num_examples
        if self._where == "disk":
            return ExampleStore(self._rows, self.num_examples, directory)
        if not directory.exists():
            _check_memory(num_bytes)
        try:
            if not directory.exists():
                check_room(SHARED_MEMORY, num_bytes)
            hold(directory)
            return ExampleStore(self._rows, self.num_examples, directory)
        except PermissionError as error:
            _log.warning("Each worker keeps a cache of its own: %s", error)
            return ExampleStore(self._rows, self.num_examples, None)
        except (UserError, OSError):  # a container's shared memory is often small
            return ExampleStore(self._rows, self.num_examples, None)

    def _base(self) -> pathlib.Path:
        if self._where == "memory":
            return SHARED_MEMORY / f"tfdist-{os.getuid()}"
        if self._directory is not None:
            return pathlib.Path(self._directory).absolute()
        return pathlib.Path(environment.cache_directory(), "examples")


def _check(structure: Any, lengths: np.ndarray | None) -> None:
    for spec in tf.nest.flatten(structure):
        shape = spec.shape[1:]
        is_padded = lengths is not None and spec.shape.rank == 2
        if spec.dtype == tf.string or spec.shape.rank is None or not (shape.is_fully_defined() or is_padded):
            raise UserError(
                f"Cached keeps numbers of fixed shapes, and lines of text; received {structure}. Give every part a "
                "fixed shape (describe it as 'fixed', or pad it in `transform`), and no strings."
            )


def _check_memory(num_bytes: int) -> None:
    free = available_bytes()
    if num_bytes > MEMORY_SHARE * free:
        raise UserError(
            f"The cache of examples would take {num_bytes:,} bytes of memory, of which {free:,} are free; at most "
            f"{MEMORY_SHARE:.0%} of that is used. Write Cached.where = 'disk', or leave the cache away."
        )


def _widths(source: Source, order: Order) -> Callable[[int, int], int] | None:
    """The longest example of a global batch, to which the source pads it."""
    lengths = source.lengths
    if lengths is None:
        return None
    numbers_at = source.numbers(order)

    @functools.lru_cache(maxsize=64)
    def width(batch: int, epoch: int) -> int:
        first = batch * order.batch_size
        places = tf.range(first, min(first + order.batch_size, source.num_examples), dtype=tf.int64)
        return max(1, int(lengths[numbers_at(places, tf.constant(epoch, tf.int64)).numpy()].max()))

    return width


def _cut(part: np.ndarray, spec: tf.TensorSpec, width: int) -> np.ndarray:
    return part if spec.shape[1:].is_fully_defined() else np.ascontiguousarray(part[:, :width])
