"""TFRecord files of `tf.train.Example`s, found by pattern, described by literals."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.formats import example_features
from tfdist.data.formats.input_files import matching_files
from tfdist.data.formats.record_files import FilePart, RecordFile, RecordFileSource, describe_corrupt
from tfdist.data.sources.columns import Columns, Decoding
from tfdist.errors import UserError

INDEXED_AT_ONCE = 16  # files; of remote ones each header read waits for the network


class TFRecordSource(RecordFileSource):
    """Examples in TFRecord files, local or gs://.

    A worker reads the ranges of the files that hold its own records; where these lie is found once, by reading the
    records' headers, and kept in the user's cache directory. Compressed files are refused.

    Args:
      files: a pattern or path, or several.
      features: of each feature to read its `tf.io.FixedLenFeature` or another of `tf.io`; sparse and ragged ones are
        filled up with 0 or '' to the longest of the batch.
      columns: which features are inputs, targets and weights.
      transforms: functions or Keras layers by the name of the feature to whose batches they are applied.
      transform: a function from the nest, (x, y) or (x, y, weight) of a batch, to the one to train on; like those of
        `transforms`, with Python's `if` or loops over tensors it has to be a `tf.function`.
      block_records: how many neighbors stay together when the order is permuted; None takes what makes a megabyte.

    Raises:
      UserError: no file matches, or the first record does not fit the descriptions.
    """

    def __init__(
        self,
        *,
        files: str | Sequence[str],
        features: Mapping[str, Any],
        columns: Columns,
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
        transform: Callable[[Any], Any] | None = None,
        block_records: int | None = None,
    ) -> None:
        self._features = example_features.read_descriptions(features)
        self._decoding = Decoding(columns, transforms, transform)
        self._decoding.check(list(self._features), "features")
        found = [RecordFile(path) for path in matching_files(files)]
        with concurrent.futures.ThreadPoolExecutor(INDEXED_AT_ONCE) as pool:
            parts = list(pool.map(lambda file: FilePart(file, 0, file.index.num_records), found))
        num_records = sum(part.take for part in parts)
        super().__init__(
            parts,
            record_bytes=sum(int(file.index.offsets[-1]) for file in found) / max(1, num_records),
            block_records=block_records,
        )
        for part in parts:
            if part.file.index.tail_bytes:
                problem = f"it is cut short, {part.file.index.tail_bytes:,} bytes of it"
                raise UserError(describe_corrupt(part.file, part.take, problem))
        first = next((number for number, part in enumerate(parts) if part.take), None)
        if first is None:
            raise UserError(f"The {len(found)} files that match {files!r} hold no records. Give files with records.")
        (record,) = self._read_runs([(0, 1)])
        example_features.check_record(record, self._features, f"Record 0 of {parts[first].file.path}")
        self.structure = decoded_structure(self.decode)

    def decode(self, records: tf.Tensor) -> Any:
        return self._decoding(example_features.parse(records, self._features))


def decoded_structure(decode: Callable[[tf.Tensor], Any]) -> Any:
    """The nest of `tf.TensorSpec`s of what `decode` gives for string [None]."""
    traced = tf.function(decode, autograph=False).get_concrete_function(tf.TensorSpec([None], tf.string))
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), traced.structured_outputs)
