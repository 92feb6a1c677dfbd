"""Examples of another source, changed on their way to the model.

Invariant: what becomes of the example at a place of an epoch depends on (seed, epoch, place) and on the examples of its
global batch alone, so it is the same for any number of workers and after a restart. An evaluation, which has no seed,
draws as if its seed and epoch were 0, and so the same each time.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.source import Order, Reader, Source, example_seeds
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.errors import UserError


class Mapped(Source):
    """Examples of `data`, changed; subclasses say how.

    Args:
      data: a data function or source whose examples can be read by position.

    Raises:
      UserError: it is a `tf.data.Dataset`, which has its own `map`.
    """

    def __init__(self, data: Callable[[], Any] | Source) -> None:
        self.source = as_source(data)
        if isinstance(self.source, StreamSource):
            raise UserError(
                f"{type(self).__name__} reads examples by position, which a tf.data.Dataset does not have. Give arrays "
                "or one of tfdist's sources, or use Dataset.map."
            )
        self.num_examples = self.source.num_examples
        self.calls_python = self.source.calls_python
        self.waits = self.source.waits
        self.has_same_batches = self.source.has_same_batches
        self.file_sizes = self.source.file_sizes

    @property
    def structure(self) -> Any:
        """The specs of the changed examples."""
        return self.describe_output(self.source.structure)

    def prepare(self, directory: str) -> None:
        """Prepares the source."""
        self.source.prepare(directory)

    def reader(self, order: Order) -> Reader:
        """Wraps the source's reader and its augmentation."""
        read = self.source.reader(order)
        augment = self.source.augment if order.seed is not None else None

        def read_augmented(positions: tf.Tensor, epoch: tf.Tensor) -> Any:
            examples = read(positions, epoch)
            return examples if augment is None else augment(examples, example_seeds(positions, epoch, order.seed))

        return self.wrap_reader(read_augmented, order)

    @abc.abstractmethod
    def describe_output(self, structure: Any) -> Any:
        """The nest of `tf.TensorSpec`s of a batch, of that of the source; raises UserError where it does not fit."""

    @abc.abstractmethod
    def wrap_reader(self, read: Reader, order: Order) -> Reader:
        """A reader of changed examples, of one of the source's."""

    def describe(self) -> list[str]:
        """Describes the source."""
        return self.source.describe()


class FirstExamples(Mapped):
    """The first examples of a source alone.

    Args:
      source: whose.
      count: how many.
    """

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source)
        self.num_examples = min(count, source.num_examples)

    def describe_output(self, structure: Any) -> Any:
        return structure

    def wrap_reader(self, read: Reader, order: Order) -> Reader:
        return read


def split_examples(structure: Any) -> tuple[Any, ...]:
    """The parts of a nest of examples: (x,), (x, y) or (x, y, sample_weight)."""
    return tuple(structure) if isinstance(structure, (tuple, list)) else (structure,)
