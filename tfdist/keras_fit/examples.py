"""What `keras.Model.fit` takes as data, as sources that tfdist trains from.

Invariant: a batch holds the examples that fit's would, with the same weights; arrays and a PyDataset come in another
order where they are shuffled. Keras's own adapters read the data, so what they take and refuse is what fit takes and
refuses; they are private to Keras and used here alone. tests/keras_fit/test_behaviors.py fails when they change.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split

from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.prebatched import PrebatchedSource, missing_input_error
from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import batch_size as size_of_batches
from tfdist.data.sources.user_dataset import count_elements, find_batching
from tfdist.errors import UserError, build_user_error
from tfdist.keras_fit.python_batches import OneShotGenerator, PythonBatches, python_kind
from tfdist.settings.checks import COUNT, or_none
from tfdist.tasks.losses import check_class_weight, weigh_classes

DEFAULT_BATCH_SIZE = 32  # Keras's
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples that one side of a call trains or evaluates on.

    Attributes:
      source: of the examples; None where there is nothing to evaluate on.
      batch_size: of a full batch.
      steps_per_epoch: updates that count as an epoch; None is one pass over the source.
      close: lets go what reads for it.
    """

    source: Source | None
    batch_size: int | None
    steps_per_epoch: int | None = None
    close: Callable[[], None] = lambda: None


def split(arrays: Any, share: float) -> tuple[Any, Any]:
    """Arrays to train on, and the last of them, by `share`, to evaluate on, as fit cuts them.

    Raises:
      UserError: they are no arrays, or one part would be empty.
    """
    if not isinstance(share, int | float) or not 0 < share < 1:
        raise UserError(f"validation_split is {share!r}; write a number between 0 and 1.")
    try:
        return train_validation_split(arrays, share)
    except ValueError as error:
        raise UserError(str(error)) from error


def to_train(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    class_weight: Mapping[int, float] | None,
    batch_size: int | None,
    steps_per_epoch: int | None,
    seed: int | None,
    epochs: range,
) -> Examples:
    """Returns the examples to train on.

    Args:
      x: as `fit` takes it; so are `y`, `sample_weight`, `class_weight`, `batch_size` and `steps_per_epoch`.
      seed: gives a PyDataset's batches in an order of its own each epoch; None keeps theirs.
      epochs: numbers of the epochs, counted from 0; a stream begins for the first.

    Raises:
      UserError: it cannot be trained on.
    """
    _check_counts(batch_size=batch_size, steps_per_epoch=steps_per_epoch)
    if not isinstance(class_weight, Mapping):
        check_class_weight(class_weight)
    if isinstance(x, Source):
        _check_alone(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
    return _examples((x, y, sample_weight), class_weight, batch_size, steps_per_epoch, seed=seed, epochs=epochs)


def to_evaluate(data: Any, *, batch_size: int | None, steps: int | None) -> Examples:
    """The examples of one evaluation, which begins with the same ones each time, a generator's aside.

    Args:
      data: as `fit` takes `validation_data`, None for none; so is `batch_size`.
      steps: how many batches; None takes all.

    Raises:
      UserError: it cannot be evaluated on.
    """
    _check_counts(validation_batch_size=batch_size, validation_steps=steps)
    if data is None:
        return Examples(None, None)
    try:
        given = (data, None, None) if isinstance(data, Source) else keras.utils.unpack_x_y_sample_weight(data)
    except ValueError as error:
        raise UserError(f"validation_data: {error}") from error
    return _examples(given, None, batch_size, steps)


def _examples(
    data: tuple[Any, Any, Any],
    class_weight: Mapping[int, float] | None,
    batch_size: int | None,
    steps: int | None,
    *,
    seed: int | None = None,
    epochs: range | None = None,
) -> Examples:
    """The examples of `epochs`; without these, of an evaluation, which leaves out what comes after so many steps."""
    x, y, sample_weight = data
    cuts = epochs is None
    if isinstance(x, Source):
        return Examples(x, batch_size or DEFAULT_BATCH_SIZE, None if cuts else steps)
    _check_values(x, "The x of validation_data" if cuts else "x")
    given = python_kind(x, seed=seed, drain=steps is None)
    if class_weight is not None and isinstance(given, tf.data.Dataset):
        given, class_weight = _apply_class_weight(given, class_weight), None
    adapter = _adapter(given, y, sample_weight, class_weight)
    if isinstance(adapter, ArrayDataAdapter):
        return _read_arrays(adapter, batch_size, steps, cuts=cuts)
    num_batches, steps = _count_batches(adapter, given, steps, "validation_steps" if cuts else "steps_per_epoch")
    of_epoch = steps or num_batches
    plan: dict[str, Any] = {
        "num_batches": of_epoch if cuts else num_batches,
        "begins_at": 0 if epochs is None else epochs.start * of_epoch,
    }
    if isinstance(given, tf.data.Dataset):
        dataset = adapter.get_tf_dataset()
        stream = (dataset.take(steps) if cuts and steps else dataset).repeat()
        size = _batch_size(adapter, dataset)
        begin = lambda first: stream.skip(first) if first else stream  # noqa: E731
        source = PrebatchedSource(begin, _as_tuple(dataset.element_spec), batch_size=size, **plan)
        return Examples(source, size, None if cuts else steps)
    total = None if epochs is None else len(epochs) * of_epoch
    batches = PythonBatches(adapter, given, num_batches=num_batches, total=total, per_pass=steps if cuts else None)
    size = getattr(given, "batch_size", None) or adapter.batch_size or DEFAULT_BATCH_SIZE
    source = PrebatchedSource(
        batches.stream,
        _as_tuple(batches.element_spec),
        batch_size=size,
        parallel=not isinstance(given, OneShotGenerator),
        first_batch=lambda: batches.first_batch,
        **plan,
    )
    return Examples(source, size, None if cuts else steps, batches.close)


def _read_arrays(adapter: ArrayDataAdapter, batch_size: int | None, steps: int | None, *, cuts: bool) -> Examples:
    """Arrays; `cuts` leaves out what comes after so many steps."""
    arrays = _as_tuple(keras.tree.lists_to_tuples(next(iter(adapter.get_numpy_iterator()))))
    count = len(keras.tree.flatten(arrays)[0])
    size = batch_size or (math.ceil(count / steps) if steps else DEFAULT_BATCH_SIZE)
    steps = _limit_steps(steps, math.ceil(count / size))
    if cuts and steps:
        arrays, steps = keras.tree.map_structure(lambda a: a[: steps * size], arrays), None
    return Examples(ArraySource(arrays), size, steps)


def _adapter(x: Any, y: Any, sample_weight: Any, class_weight: Any) -> Any:
    """Keras's adapter; of arrays one that gives all of them in a batch."""
    if isinstance(x, tf.distribute.DistributedDataset):
        raise UserError("x is a dataset that is distributed already; give the tf.data.Dataset it was made of.")
    leaves = keras.tree.flatten(x)
    count = len(leaves[0]) if leaves and hasattr(leaves[0], "shape") and len(leaves[0].shape) else 1
    try:
        return get_data_adapter(
            x=x.generator if isinstance(x, OneShotGenerator) else x,
            y=y,
            sample_weight=sample_weight,
            class_weight=class_weight,
            batch_size=max(1, count),
        )
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _apply_class_weight(dataset: tf.data.Dataset, class_weight: Mapping[int, float]) -> tf.data.Dataset:
    """The dataset with weights by class; Keras's own knows no class beyond the largest of `class_weight`."""
    classes = check_class_weight(class_weight)
    _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(dataset.element_spec)
    if sample_weight is not None:
        raise UserError("class_weight and the dataset's sample_weight cannot be given at the same time.")
    if not isinstance(y, tf.TensorSpec):
        raise UserError("class_weight is for a model with a single output, and needs its targets y.")
    assert classes is not None
    return dataset.map(lambda x, y: (x, y, weigh_classes(y, classes)), num_parallel_calls=tf.data.AUTOTUNE)


def _count_batches(adapter: Any, given: Any, steps: int | None, name: str) -> tuple[int, int | None]:
    """The batches of one pass over the data, and the steps of an epoch where these are others."""
    if isinstance(given, OneShotGenerator):
        assert steps is not None
        return steps, steps
    if isinstance(given, tf.data.Dataset):
        found = count_elements(given, "batches", name) if steps is None else int(given.cardinality())
        if not found:
            raise UserError(f"{'x' if name == 'steps_per_epoch' else 'validation_data'} holds no batch.")
        num_batches = found if found > 0 else None
    else:
        num_batches = adapter.num_batches
    if num_batches is None and steps is None:
        raise UserError(
            f"The {type(given).__name__} has no end, or no batch. Say how many batches to take: {name} = N."
        )
    count = num_batches or steps
    assert count is not None
    return count, _limit_steps(steps, num_batches)


def _limit_steps(steps: int | None, num_batches: int | None) -> int | None:
    """The steps that one pass over the data has, where more are asked for; a warning says so."""
    if steps is None or num_batches is None or steps <= num_batches:
        return steps
    message = "%d steps were asked for, and the data holds %d batches: an epoch has %d steps."
    _LOG.warning(message, steps, num_batches, num_batches)
    return num_batches


def _batch_size(adapter: Any, dataset: tf.data.Dataset) -> int:
    known = adapter.batch_size or size_of_batches(find_batching(dataset))
    return known or int(keras.tree.flatten(next(iter(dataset)))[0].shape[0])


def _as_tuple(nest: Any) -> tuple[Any, ...]:
    return nest if isinstance(nest, tuple) else (nest,)


def _check_values(x: Any, name: str) -> None:
    """Raises UserError where x or one of its inputs is None, is sparse or holds no examples."""
    if x is None:
        raise UserError(f"{name} is None; write arrays, a batched tf.data.Dataset, a PyDataset or a generator.")
    for leaf in keras.tree.flatten(x):
        if leaf is None:
            raise missing_input_error(name)
        if hasattr(leaf, "toarray"):
            raise UserError(f"{name} is sparse; write x.toarray().")
        if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor):
            dense = "x.to_tensor()" if isinstance(leaf, tf.RaggedTensor) else "tf.sparse.to_dense(x)"
            raise UserError(f"{name} is a {type(leaf).__name__}; write {dense}.")
        if [*getattr(leaf, "shape", ())][:1] == [0]:
            raise build_user_error(f"{name} holds no examples.", error_id="no-examples")


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        or_none(COUNT)(f"fit.{name}", value)


def _check_alone(x: Source, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise UserError(f"x is a {type(x).__name__}, which holds all of an example; leave {name} out.")
