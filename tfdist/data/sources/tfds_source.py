"""TensorFlow Datasets by name and split, read from where they were prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.formats.record_files import FilePart, RecordFile, RecordFileSource
from tfdist.data.formats.tfrecord import Decoding, decoded_structure
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.indexed import IndexedSource
from tfdist.data.sources.source import Source
from tfdist.data.sources.tfds_builders import find_builder
from tfdist.data.sources.tfds_decoding import batch_decoder
from tfdist.errors import UserError, missing_extra, suggest


def load_tfds(
    *,
    name: str,
    split: str,
    data_dir: str | None = None,
    download: bool = False,
    columns: Columns | None = None,
    transforms: Mapping[str, Callable[[Any], Any]] | None = None,
    transform: Callable[[Any], Any] | None = None,
    block_records: int | None = None,
) -> Source:
    """A split of a TensorFlow data set.

    TFRecord files are read by ranges, each block by one worker (see `block_order.py`); ArrayRecord files by number.

    Args:
      name: "mnist", "mnist:3.0.1", "glue/cola".
      split: "train", or an expression: "train[:80%]", "train+test", "train[10:20]".
      data_dir: where it was prepared, local or gs://; None takes ~/tensorflow_datasets.
      download: downloads and prepares it first where it is not prepared: one worker does, the others wait for it.
      columns: which features are inputs, targets and weights; None takes the data set's own supervised keys.
      transforms: functions or Keras layers by the name of the feature to whose batches they are applied.
      transform: a function from the nest, (x, y) or (x, y, weight) of a batch, to the one to train on; like those of
        `transforms`, with Python's `if` or loops over tensors it has to be a `tf.function`.
      block_records: how many neighbors of a TFRecord file stay together when the order is permuted; None takes what
        makes a megabyte.

    Raises:
      UserError: it is not prepared, has no such split or columns, or is in a format that cannot be read so.
    """
    builder = find_builder(name, data_dir=data_dir, download=download)
    features = builder.info.features
    decoding = Decoding(columns or _supervised(builder, name), transforms, transform)
    decoding.check(list(features), f"The data set {name!r}")
    parse = batch_decoder(features)

    def decode(records: tf.Tensor) -> Any:
        return decoding(parse(records))

    parts = [part for part in _split(builder, name, split).file_instructions if part.take]
    if not parts:
        raise UserError(f"The split {split!r} of {name!r} holds no examples. Write a larger one.")
    file_format = builder.info.file_format.value
    if file_format == "array_record":
        return IndexedSource(_open_array_records(parts), transform=decode)
    if file_format != "tfrecord":
        raise UserError(
            f"The data set {name!r} is prepared as {file_format!r} files; tfdist reads 'tfrecord' and 'array_record'. "
            f"Prepare it so, with: tfds build {name} --file_format=array_record"
        )
    record_files = {path: RecordFile(path) for path in dict.fromkeys(str(part.filename) for part in parts)}
    return _TfdsRecords(
        [FilePart(record_files[str(part.filename)], part.skip, part.take) for part in parts],
        decode,
        record_bytes=sum(f.num_bytes for f in record_files.values()) / sum(part.examples_in_shard for part in parts),
        block_records=block_records,
    )


def _open_array_records(parts: Sequence[Any]) -> Any:
    try:
        from array_record.python.array_record_data_source import ArrayRecordDataSource
    except ImportError as error:
        raise missing_extra("array_record", "tfds", "An ArrayRecord file") from error
    return ArrayRecordDataSource(parts)


class _TfdsRecords(RecordFileSource):
    def __init__(self, parts: list[FilePart], decode: Callable[[tf.Tensor], Any], **settings: Any) -> None:
        super().__init__(parts, **settings)
        self._decode = decode
        self.structure = decoded_structure(decode)

    def decode(self, records: tf.Tensor) -> Any:
        return self._decode(records)


def _split(builder: Any, name: str, split: str) -> Any:
    known = list(builder.info.splits)
    try:
        return builder.info.splits[split]
    except (KeyError, ValueError, TypeError, AssertionError) as error:
        base = str(split).split("[")[0]
        raise UserError(
            f"The data set {name!r} has no split {split!r}; it has {known}.{suggest(base, known)} Write one of them, "
            f"or an expression such as '{known[0] if known else 'train'}[:80%]'."
        ) from error


def _supervised(builder: Any, name: str) -> Columns:
    keys = builder.info.supervised_keys
    if not keys or not all(isinstance(key, str) for key in keys):
        raise UserError(
            f"The data set {name!r} does not say which features are inputs and targets; it has "
            f"{sorted(builder.info.features)}. Write columns = @columns.Columns() with inputs and targets."
        )
    return Columns(inputs=keys[0], targets=keys[1], weights=keys[2] if len(keys) > 2 else None)
