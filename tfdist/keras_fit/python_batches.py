"""Batches that Python code gives one by one: a generator, a `keras.utils.PyDataset`, a loader of another library.

Invariant: the stream depends on the data and the seed alone, so that one which begins at a later step skips to what
stands there. A generator is read once, no further than the training needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist import user_code
from tfdist.data.sources.failures import record_errors
from tfdist.errors import TfdistError, UserError

MOST_HELD_BYTES = 1 << 30  # of a generator that says nothing of its length
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class OneShotGenerator:
    """A generator whose first batch has `batch_size` examples; `generator` gives that batch, too."""

    generator: Iterator[Any]
    batch_size: int | None


class BatchError(UserError):
    """An error that the user's data raised instead of a batch, in one message; `raised` is the exception itself."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(user_code.build_error("The data", raised)))
        self.raised = raised


class OrderedBatches(keras.utils.PyDataset):
    """A PyDataset in another order each epoch, or its own.

    Attributes:
      batch_size: examples of the first batch that was read, in this process.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int | None) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._seed = seed
        self._order: np.ndarray | None = None
        self.batch_size: int | None = None

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def arrange(self, epoch: int) -> None:
        """Sets the order of the examples in an epoch."""
        if self._seed is not None and self.num_batches is not None:
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self.num_batches)

    def __getitem__(self, index: int) -> Any:
        batch = self._dataset[index if self._order is None else int(self._order[index])]
        if self.batch_size is None:
            self.batch_size = _rows(batch)
        return batch

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


class ListedBatches(keras.utils.PyDataset):
    """Batches in memory."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self._batches = batches
        self.batch_size = _rows(batches[0])

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def python_kind(x: Any, *, seed: int | None, drain: bool) -> Any:
    """A generator or a PyDataset, made ready for its adapter; anything else as it is.

    Args:
      x: what `fit` was given.
      seed: of a PyDataset's order; None keeps its own.
      drain: holds a generator's batches in memory, as nothing says how many there are.

    Raises:
      UserError: the generator gives nothing, or more than fits in memory.
    """
    if isinstance(x, keras.utils.PyDataset):
        return OrderedBatches(x, seed)
    if not isinstance(x, types.GeneratorType):
        return x
    if drain:
        return ListedBatches(_cache_all_batches(x))
    first = next(x, None)
    if first is None:
        raise UserError("The generator gives no batch.")
    whole = (each for each in itertools.chain([first], x))  # Keras takes generators alone
    return OneShotGenerator(whole, _rows(first))


class PythonBatches:
    """A stream of batches out of one of Keras's adapters.

    Args:
      adapter: of the data.
      given: what `python_kind` made of it.
      num_batches: of one pass, as long as it is now; of data that grows later, an epoch takes as many.
      total: of all that the training needs, of a generator; None does not end.
      per_pass: how many of a pass are taken; None takes all.

    Raises:
      UserError: the first batches cannot be read, or do not look alike.
    """

    def __init__(
        self, adapter: Any, given: Any, *, num_batches: int, total: int | None = None, per_pass: int | None = None
    ) -> None:
        self._adapter = adapter
        self._given = given
        self._num_batches = per_pass or num_batches
        self._length: int | None = adapter.num_batches  # None of data without end
        self._per_pass = per_pass or self._length
        self._total = total
        self._has_grown = False
        self.first_batch: Any = None  # that was read
        try:
            self.element_spec = adapter.get_tf_dataset().element_spec
        except (ValueError, TypeError) as error:
            raise UserError(f"The first batches of the data do not make a stream: {error}") from error

    def stream(self, first: int) -> tf.data.Dataset:
        """The batches from a step on, without end."""
        batches = self._read_once if isinstance(self._given, OneShotGenerator) else self._read_again
        return tf.data.Dataset.from_generator(
            lambda: _record_batch_errors(batches(first)), output_signature=self.element_spec
        )

    def close(self) -> None:
        """Ends the threads or processes that read ahead."""
        enqueuer = getattr(self._adapter, "enqueuer", None)
        if enqueuer is not None:
            with contextlib.suppress(Exception):  # of batches that it has read ahead, and nobody will take
                enqueuer.stop()

    def _read_again(self, first: int) -> Iterator[Any]:
        self._adapter.on_epoch_end()  # as fit does before its first epoch
        epoch, skipped = divmod(first, self._num_batches)
        for number in itertools.count(epoch):
            if isinstance(self._given, OrderedBatches):
                self._given.arrange(number)
            self._adapter.on_epoch_begin()
            self._check_length()
            for index, batch in enumerate(itertools.islice(self._adapter.get_numpy_iterator(), self._per_pass)):
                if index >= skipped:
                    self.first_batch = batch if self.first_batch is None else self.first_batch
                    yield batch
            self._adapter.on_epoch_end()
            skipped = 0

    def _check_length(self) -> None:
        """Warns once that later passes are cut; raises UserError where a pass is too short."""
        now = self._adapter.num_batches
        if self._per_pass is None or self._length is None or now == self._length:
            return
        if now < self._per_pass:
            raise UserError(
                f"The data had {self._per_pass:,} batches for an epoch at first, and has {now:,} now. Give as many in "
                f"every epoch, or no more than the shortest has: steps_per_epoch (or validation_steps) = {now}."
            )
        if not self._has_grown:
            self._has_grown = True
            _LOG.warning(
                "The data had %d batches at first, and has %d now: an epoch takes the first %d, and the others are not "
                "used.",
                self._length,
                now,
                self._per_pass,
            )

    def _read_once(self, first: int) -> Iterator[Any]:
        count, batch = 0, None
        for count, batch in enumerate(self._adapter.get_numpy_iterator(), 1):
            if count > first:
                yield batch
            if count == self._total:
                break
        else:
            needed = f"{self._total:,} are needed" if self._total else "more are needed"
            raise UserError(
                f"The generator ended after {count:,} batches, and {needed} (steps of an epoch × epochs). Let it run "
                "without end, or give fewer steps."
            )
        yield from itertools.repeat(batch)  # read ahead by the pipeline, and never trained on


def _record_batch_errors(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields the batches; records errors of the data, which TensorFlow would turn into its own."""
    try:
        yield from batches
    except Exception as error:
        record_errors(_raise_error)(error)


def _raise_error(error: Exception) -> NoReturn:
    if isinstance(error, TfdistError):
        raise error
    raise BatchError(error) from error


def _cache_all_batches(generator: types.GeneratorType) -> list[Any]:
    batches, size = [], 0
    for batch in generator:
        batches.append(batch)
        size += sum(getattr(leaf, "nbytes", 0) for leaf in keras.tree.flatten(batch))
        if size > MOST_HELD_BYTES:
            raise UserError(
                f"The generator gave {len(batches):,} batches, {size >> 20:,} MiB, and has not ended. Say how many "
                "make an epoch: steps_per_epoch (or validation_steps) = N."
            )
    if not batches:
        raise UserError("The generator gives no batch.")
    _LOG.warning("Held the generator's %d batches in memory; the number of steps spares that.", len(batches))
    return batches


def _rows(batch: Any) -> int | None:
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    return len(leaves[0]) if leaves and np.ndim(leaves[0]) else None
