"""TensorFlow Datasets by name and split, read from where they were prepared.

Invariant: no code of the data set runs and nothing is fetched: what was prepared is read from its own directory.
`tensorflow_datasets` is imported when it is first needed, not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.formats.input_files import expand_path, file_version
from tfdist.data.formats.record_files import FilePart, RecordFile, RecordFileSource
from tfdist.data.sources.augment import Augmentation, LayerBuilder
from tfdist.data.sources.columns import Columns, Decoding
from tfdist.data.sources.indexed import IndexedSource
from tfdist.data.sources.source import Source
from tfdist.errors import UserError, check_package, suggest
from tfdist.storage import files

DEFAULT_DIRECTORY = os.path.join("~", "tensorflow_datasets")


def load_tfds(
    *,
    name: str,
    split: str,
    data_dir: str | None = None,
    columns: Columns | None = None,
    transforms: Mapping[str, Callable[[Any], Any]] | None = None,
    transform: Callable[[Any], Any] | None = None,
    augmentation: Sequence[LayerBuilder] = (),
    block_records: int | None = None,
) -> Source:
    """A split of a TensorFlow data set.

    TFRecord files are read by ranges, each block by one worker (see `block_order.py`); ArrayRecord files by number.

    Args:
      name: "mnist", "mnist:3.0.1", "glue/cola".
      split: "train", or an expression: "train[:80%]", "train+test", "train[10:20]".
      data_dir: where it was prepared, local or gs://; None takes ~/tensorflow_datasets.
      columns: which features are inputs, targets and weights; None takes the data set's own supervised keys.
      transforms: functions or Keras layers by the name of the feature to whose batches they are applied.
      transform: a function from the nest, (x, y) or (x, y, weight) of a batch, to the one to train on; like those of
        `transforms`, with Python's `if` or loops over tensors it has to be a `tf.function`.
      augmentation: builders of Keras layers that change the inputs while training, see `augment.py`.
      block_records: how many neighbors of a TFRecord file stay together when the order is permuted; None takes what
        makes a megabyte.

    Raises:
      UserError: it is not prepared, has no such split or columns, or is in a format that cannot be read so.
    """
    builder = find_builder(name, data_dir=data_dir)
    features = builder.info.features
    decoding = Decoding(columns or _find_supervised_columns(builder, name), transforms, transform)
    decoding.check(list(features), f"The data set {name!r}")
    parse = build_decoder(features)

    def decode(records: tf.Tensor) -> Any:
        return decoding(parse(records))

    parts = [part for part in _find_split(builder, name, split).file_instructions if part.take]
    if not parts:
        raise UserError(f"The split {split!r} of {name!r} holds no examples. Write a larger one.")
    file_format = builder.info.file_format.value
    if file_format == "array_record":
        check_package("array_record", "array_record", "tfds", "An ArrayRecord file")
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        source: Source = IndexedSource(ArrayRecordDataSource(parts), transform=decode)
    elif file_format == "tfrecord":
        record_files = {path: RecordFile(file_version(path)) for path in {str(part.filename) for part in parts}}
        source = RecordFileSource(
            [FilePart(record_files[str(part.filename)], part.skip, part.take) for part in parts],
            decode,
            record_bytes=sum(f.version.num_bytes for f in record_files.values())
            / sum(part.examples_in_shard for part in parts),
            block_records=block_records,
        )
    else:
        raise UserError(
            f"The data set {name!r} is prepared as {file_format!r} files; tfdist reads 'tfrecord' and 'array_record'. "
            f"Prepare it so, with: tfds build {name} --file_format=array_record"
        )
    source.augment = Augmentation(augmentation, source.structure) if augmentation else None
    return source


def _find_split(builder: Any, name: str, split: str) -> Any:
    known = list(builder.info.splits)
    try:
        return builder.info.splits[split]
    except (KeyError, ValueError, TypeError, AssertionError) as error:
        base = str(split).split("[")[0]
        raise UserError(
            f"The data set {name!r} has no split {split!r}; it has {known}.{suggest(base, known)} Write one of them, "
            f"or an expression such as '{known[0] if known else 'train'}[:80%]'."
        ) from error


def _find_supervised_columns(builder: Any, name: str) -> Columns:
    keys = builder.info.supervised_keys
    if not keys or not all(isinstance(key, str) for key in keys):
        raise UserError(
            f"The data set {name!r} does not say which features are inputs and targets; it has "
            f"{sorted(builder.info.features)}. Write tfdist.load_tfds.columns = @tfdist.Columns(), with inputs "
            "and targets."
        )
    return Columns(inputs=keys[0], targets=keys[1], weights=keys[2] if len(keys) > 2 else None)


def find_builder(name: str, *, data_dir: str | None) -> Any:
    """The builder of a prepared data set.

    Args:
      name: as TFDS writes it: "mnist", "mnist:3.0.1", "glue/cola".
      data_dir: where data sets lie, local or gs://; None takes TFDS's own ~/tensorflow_datasets.

    Raises:
      UserError: it is not prepared; or the package is missing.
    """
    tfds = import_tfds()
    directory = expand_path(data_dir or DEFAULT_DIRECTORY)
    from tensorflow_datasets.core import registered

    try:
        if files.exists(directory):
            return tfds.core.read_only_builder.builder_from_files(name, data_dir=directory)
    except registered.DatasetNotFoundError:
        pass  # the message below lists what there is
    except ValueError as error:  # a name that TFDS does not parse
        raise UserError(f"{name!r} is no name of a TensorFlow data set: {error}") from error
    there = [each for each in files.list_names(directory) if not each.startswith((".", "downloads"))]
    raise UserError(
        f"The TensorFlow data set {name!r} is not prepared in {directory}; "
        f"{f'there are {there}' if there else 'there is none'}.{suggest(name, there)} Prepare it where there is a "
        f"network, with: tfds build {name} --data_dir={directory}"
    )


def import_tfds() -> Any:
    """The package, or the message that says how to install it."""
    check_package("importlib_resources", "importlib_resources", "tfds", "load_tfds")  # TFDS does not ask for it
    check_package("tensorflow_datasets", "tensorflow-datasets", "tfds", "load_tfds")
    import tensorflow_datasets

    return tensorflow_datasets


def build_decoder(features: Any) -> Callable[[tf.Tensor], dict[str, Any]]:
    """A function from records, string [n], to a dict of batches, by the builder's own `features`."""
    specs = tf.nest.map_structure(lambda info: tf.TensorSpec(info.shape, info.tf_dtype), features.get_tensor_info())

    def decode(records: tf.Tensor) -> dict[str, Any]:
        return tf.map_fn(features.deserialize_example, records, fn_output_signature=specs, parallel_iterations=32)

    return decode
