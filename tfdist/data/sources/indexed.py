"""Examples of any object with `__len__` and `__getitem__`: a list, a torch-style data set, grain, TFDS, Hugging Face.

Invariant: which examples a batch holds depends on (seed, epoch, step) alone, as for arrays; where an example is
read, here, in threads or in processes, changes nothing that it does not draw at random itself.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.columns import Columns, Decoding
from tfdist.data.sources.examples_by_number import begin_process, describe_nest, read_batch, read_in_process
from tfdist.data.sources.failures import call_python
from tfdist.data.sources.source import Order, Source, StagedReader, permute, trace_structure
from tfdist.errors import UserError
from tfdist.settings.checks import whole_number


class IndexedSource(Source):
    """Examples that a Python object gives by their number.

    Args:
      data: has `__len__` and `__getitem__`; `__getitems__`, which takes a list of numbers, is used where it is there.
        An example is a tuple `(x, y)` or `(x, y, sample_weight)`, or a dict. All examples have the same shapes.
      columns: which keys of a dict are inputs, targets and weights; None leaves examples as they are.
      transforms: functions or Keras layers by the key to whose batches they are applied; they need `columns`.
      transform: a function from the nest of a batch to the one to train on, in TensorFlow operations.
      num_threads: threads that call `data` at the same time; 0 calls it from one thread at a time.
      num_processes: processes with a copy of `data` each, which has to be picklable; 0 starts none.

    Raises:
      UserError: data has no examples, its first one cannot be trained on, or a setting is wrong.
    """

    calls_python = True

    def __init__(
        self,
        data: Any,
        *,
        columns: Columns | None = None,
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_threads: int = 0,
        num_processes: int = 0,
    ) -> None:
        whole_number(0)("IndexedSource.num_threads", num_threads)
        whole_number(0)("IndexedSource.num_processes", num_processes)
        if num_threads and num_processes:
            raise UserError("IndexedSource takes num_threads or num_processes; received both. Leave one out.")
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UserError(
                "IndexedSource.data is an object with __len__ and __getitem__, which gives one example by its number; "
                f"received {type(data).__name__}."
            )
        self._data = data
        self._name = type(data).__name__
        self._num_threads = num_threads
        self._num_processes = num_processes
        self._executor: concurrent.futures.Executor | None = None  # which begins no thread or process before it reads
        if num_threads:
            self._executor = concurrent.futures.ThreadPoolExecutor(num_threads)
        if num_processes:
            self._executor = concurrent.futures.ProcessPoolExecutor(
                num_processes,
                mp_context=multiprocessing.get_context("spawn"),  # a fork would lack TensorFlow's threads
                initializer=begin_process,
                initargs=(data,),
            )
        self._lock = threading.Lock()
        self.num_examples = _count_examples(data)
        # Of the columns that transforms name, too, `read_batch` says which are missing.
        self._columns = columns and Columns([*columns.names, *(transforms or ())], ())
        first = read_batch(data, [0], columns=self._columns)
        self._description = describe_nest(first, is_batch=True)
        self._examples = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), first)
        if columns is None and transforms:
            raise UserError("IndexedSource.transforms needs IndexedSource.columns, which names inputs and targets.")
        self._decode: Callable[[Any], Any] = transform or (lambda examples: examples)
        if columns is not None:
            if not isinstance(first, dict):
                raise UserError(
                    "IndexedSource.columns chooses among the keys of a dict; an example of "
                    f"{self._name} is {self._description}. Leave columns out."
                )
            self._decode = Decoding(columns, transforms, transform)
        self.structure = trace_structure(self._decode, self._examples)

    def reader(self, order: Order) -> StagedReader:
        """Fetches in one thread of the pipeline, and decodes in several."""

        def fetch_examples(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            indices = permute(positions, epoch, num_examples=self.num_examples, seed=order.seed)
            return call_python(self._read, [indices], self._examples)

        return StagedReader(fetch_examples, self._decode)

    def _read(self, indices: np.ndarray) -> list[np.ndarray]:
        """The arrays of these examples, in the order of the flat structure."""
        numbers = [int(index) for index in indices]
        if self._executor is not None:
            parts = self._read_in_parallel(numbers)
        else:
            with self._lock:
                parts = [read_batch(self._data, numbers, self._description, self._columns)]
        columns = zip(*(tf.nest.flatten(part) for part in parts), strict=True)
        return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in columns]

    def _read_in_parallel(self, numbers: Sequence[int]) -> list[Any]:
        assert self._executor is not None
        count = min(len(numbers), self._num_threads or self._num_processes)
        parts = [numbers[len(numbers) * i // count : len(numbers) * (i + 1) // count] for i in range(count)]
        read = read_in_process if self._num_processes else functools.partial(read_batch, self._data)
        try:
            return list(self._executor.map(read, parts, [self._description] * count, [self._columns] * count))
        except BrokenProcessPool as error:
            raise UserError(
                f"A process of IndexedSource ended while it read {self._name}[{numbers[0]}] or one that follows. Look "
                "for its message above. Where there is none, the system may have killed it for its memory: write fewer "
                "num_processes."
            ) from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UserError(
                f"IndexedSource.num_processes needs data that can be pickled; {self._name} cannot: {error}. Define its "
                "class and functions at the top of a module, or write num_threads."
            ) from error


def is_indexed(data: Any) -> bool:
    """True where an object gives examples by number, and is not a nest of arrays."""
    if isinstance(data, list):
        return bool(data) and isinstance(data[0], tuple | dict)
    if isinstance(data, Mapping | tuple | str | bytes) or hasattr(data, "__array__"):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _count_examples(data: Any) -> int:
    count = len(data)
    if count == 0:
        raise UserError(f"{type(data).__name__} holds no examples: its len() is 0.")
    if count >= sys.maxsize:
        raise UserError(f"{type(data).__name__} repeats for ever. Leave repeat() out: tfdist counts epochs itself.")
    return count
