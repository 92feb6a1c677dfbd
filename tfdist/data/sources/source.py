"""Sources of examples: a fixed number of them, any of which can be the next.

A source gives, for positions in an epoch, the examples that stand there. Which example stands where is its order: a
pure function of (seed, epoch), never of the number of workers. Random-access sources permute freely; sources of files
permute blocks (`block_order.py`), so that a worker opens only what it needs.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfdist.storage import files
from tfdist.telemetry.records import load_record

FittedRecord = TypeVar("FittedRecord")
Reader = Callable[[tf.Tensor, tf.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The encoding of raw inputs before a model sees them, for exports.

    Attributes:
      inputs: what the program gives, by name, with a batch axis.
      function: from a dict of these to the x of an example.
      kept: holds its tables, which an export has to keep.
      first: the raw inputs of so many examples, the first in their own order.
    """

    inputs: Mapping[str, tf.TensorSpec]
    function: Callable[[Mapping[str, tf.Tensor]], Any]
    kept: tf.Module
    first: Callable[[int], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class StagedReader:
    """A reader in two stages: Python code that fetches, then TensorFlow operations that decode.

    Python code runs one thread at a time, whatever their number, so that the pipeline lets one thread fetch and
    several decode.

    Args:
      fetch: from positions and epoch to a nest of tensors.
      decode: from that nest to the nest of the examples.
    """

    fetch: Reader
    decode: Callable[[Any], Any]

    def __call__(self, positions: tf.Tensor, epoch: tf.Tensor) -> Any:
        return self.decode(self.fetch(positions, epoch))


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which a run goes through the examples.

    Attributes:
      batch_size: examples of a global batch; file sources lay their streams so that a worker's part of every batch
        comes from the same ones.
      seed: of the permutation, another one each epoch; None keeps the examples in their own order.
    """

    batch_size: int
    seed: int | None


class Source(abc.ABC):
    """Examples to train or evaluate on. Making one reads no examples, only what is needed to count and describe them.

    Attributes:
      num_examples: examples in an epoch.
      structure: the nest of an example, with a `tf.TensorSpec` of a batch, shape [None, …], for each part.
      augment: maps a nest of a batch and int32 [n, 2] seeds, one pair an example, to the nest to train on; None leaves
        examples as they are. The seeds depend on (seed, epoch, place in the epoch's order) alone, and so does which
        example stands there.
    """

    num_examples: int
    structure: Any
    augment: Callable[[Any, tf.Tensor], Any] | None = None
    cheaper = "Decode the examples once, into .npy files, and read these with array_files.ArrayFiles"
    """Advice that makes reading cheaper."""
    calls_python = False
    """True where the reader runs Python code, which then wants threads of its own beside the pipeline's."""
    waits = False
    """True where reading waits, as for a bucket, so that several batches are to be fetched at a time."""
    has_same_batches = True
    """True where each worker could read the whole of a global batch about as quickly as its own part."""
    counts_examples = True
    """False where `num_examples` takes every batch for a full one."""
    file_sizes: Sequence[int] = ()
    """The examples in each file, which workers compare, where an example's place depends on them."""

    @property
    def input_hint(self) -> str:
        """Advice for a training that waits for its input, a sentence or two."""
        augmented = " Augmentation is cheaper in the model." if self.augment is not None else ""
        return f"{self.cheaper}; see docs/data.md.{augmented}"

    def prepare(self, directory: str) -> None:
        """Fits what is to be the same in every split and process of a run: vocabularies, means.

        Called once by every worker, before `structure` is used: by the chief first, then by the others. What the chief
        leaves in `directory`, which belongs to the run and may be missing yet, the others and later runs of
        `--mode=evaluate` find there. Where nobody calls it, as in a check, the source fits for itself alone.
        """

    def first_batch(self) -> Any:
        """The first global batch that was read in this process, where `has_same_batches` denies it and all read all."""
        return None

    @abc.abstractmethod
    def reader(self, order: Order) -> Reader:
        """A function from positions, int64 [n], and the epoch, int64 scalar, to the nest of those examples.

        It runs inside tf.data, by several threads at once, with positions of one global batch at a time. It is traced
        without AutoGraph, as models are: what has Python's `if` or loops over tensors has to be a `tf.function`.
        """

    def preprocessing(self) -> Preprocessing | None:
        """The encoding of raw inputs, for exports; None where Python does it, or there is nothing to do."""
        return None

    def arrays_in_memory(self) -> Any:
        """The nest of arrays of all examples, where they are at hand without reading; else None. For checks."""
        return None

    def describe(self) -> list[str]:
        """Lines on what is read and how, for `--mode=validate`."""
        return []


def load_or_fit(
    directory: str, name: str, settings: Any, record: type[FittedRecord], fit: Callable[[], FittedRecord]
) -> tuple[str, FittedRecord]:
    """Loads what was fitted for a run from the file of its name and settings; the first process that calls writes it.

    Args:
      directory: as `Source.prepare` takes it.
      name: of the kind of source.
      settings: that decide what is fitted, in JSON's types.
      record: the dataclass of what is fitted.
      fit: makes it.

    Returns:
      The file's path, and what was fitted.
    """
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    path = files.join(directory, f"{name}-{digest}.json")
    fitted = load_record(path, record)
    if fitted is None:
        fitted = fit()
        files.make_dirs(directory)
        files.write_atomic(path, json.dumps(vars(fitted), ensure_ascii=False, indent=1) + "\n")
    return path, fitted


def trace_structure(function: Callable[[Any], Any], spec: Any) -> Any:
    """The nest of `tf.TensorSpec`s of what a function in TensorFlow's operations gives for a nest of them."""
    traced = tf.function(function, autograph=False).get_concrete_function(spec)
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs)


def describe_structure(structure: Any) -> str:
    """Types and shapes of an example, as `({x: float32[8, 8]}, int64[])`."""
    described = tf.nest.map_structure(lambda s: f"{s.dtype.name}{s.shape.as_list()[1:]}", structure)
    return str(described).replace("'", "")


def permute(positions: tf.Tensor, epoch: tf.Tensor, *, num_examples: int, seed: int | None) -> tf.Tensor:
    """A permutation of 0 … num_examples - 1 by (seed, epoch), at `positions`, int64 [n]; costs what n costs."""
    if seed is None or num_examples == 1:
        return positions
    return tf.random.experimental.index_shuffle(
        positions,
        seed=tf.stack([tf.constant(seed, tf.int64), epoch]),
        max_index=tf.constant(num_examples - 1, tf.int64),
    )


def example_seeds(positions: tf.Tensor, epoch: tf.Tensor, seed: int | None) -> tf.Tensor:
    """int32 [n, 2] seeds for what is random about the examples at these places; without a seed, of seed and epoch 0."""
    if seed is None:
        seed, epoch = 0, tf.zeros_like(epoch)
    key = tf.random.experimental.stateless_fold_in(tf.constant([seed, 0x5EED], tf.int64), epoch)
    mixed = tf.stack([key[0] + positions, tf.fill(tf.shape(positions), key[1])], axis=1)
    # Neighboring seeds are fine: every stateless operation scrambles its seed.
    return tf.cast(tf.bitwise.bitwise_and(mixed, 0x7FFFFFFF), tf.int32)
