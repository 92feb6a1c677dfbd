"""TFRecord files of `tf.train.Example`s, found by pattern, described by literals."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.data.formats.input_files import Patterns, find_files
from tfdist.data.formats.record_files import FilePart, RecordFile, RecordFileSource, describe_corrupt
from tfdist.data.sources.columns import Columns, Decoding
from tfdist.errors import UserError

INDEXED_AT_ONCE = 16  # files; of remote ones each header read waits for the network
KINDS = (
    tf.io.FixedLenFeature,
    tf.io.FixedLenSequenceFeature,
    tf.io.RaggedFeature,
    tf.io.SparseFeature,
    tf.io.VarLenFeature,
)
STORED_TYPES = {"float32": tf.float32, "int64": tf.int64, "string": tf.string}
EXAMPLE = "@tf.io.FixedLenFeature(shape=(8, 8, 1), dtype='float32')"


class TFRecordSource(RecordFileSource):
    """Examples in TFRecord files, local or gs://.

    A worker reads the ranges of the files that hold its own records; where these lie is found once, by reading the
    records' headers, and kept in the user's cache directory. Compressed files are refused.

    Args:
      files: a pattern or path, or several.
      features: of each feature to read its `tf.io.FixedLenFeature` or another of `tf.io`; sparse and ragged ones are
        filled up with 0 or '' to the longest of the replica's part of the batch.
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
        files: Patterns,
        features: Mapping[str, Any],
        columns: Columns,
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
        transform: Callable[[Any], Any] | None = None,
        block_records: int | None = None,
    ) -> None:
        self._features = described = _read_descriptions(features)
        decoding = Decoding(columns, transforms, transform)
        decoding.check(list(described), "features")
        found = [RecordFile(version) for version in find_files(files, "TFRecordSource.files")]
        with concurrent.futures.ThreadPoolExecutor(INDEXED_AT_ONCE) as pool:
            parts = list(pool.map(lambda file: FilePart(file, 0, file.num_records), found))
        for part in parts:
            if tail_bytes := part.file.version.num_bytes - int(part.file.offsets[-1]):
                problem = f"it is cut short, {tail_bytes:,} bytes of it"
                raise UserError(describe_corrupt(part.file, part.take, problem))
        first = next((part.file for part in parts if part.take), None)
        if first is None:
            raise UserError(f"The {len(found)} files that match {files!r} hold no records. Give files with records.")
        (record,) = first.read(0, 1)
        _check_record(record, described, f"Record 0 of {first.path}")
        super().__init__(
            parts,
            lambda records: decoding(_parse(records, described)),
            record_bytes=sum(int(file.offsets[-1]) for file in found) / sum(part.take for part in parts),
            block_records=block_records,
        )

    def describe(self) -> list[str]:
        """Counts files, records and bytes; notes features whose padding depends on the number of replicas."""
        fixed = (tf.io.FixedLenFeature, tf.io.FixedLenSequenceFeature)
        padded = [name for name, feature in self._features.items() if not isinstance(feature, fixed)]
        note = f"note: each replica pads {', '.join(padded)} to its own longest example. Mask the padding in the model."
        return [*super().describe(), *([note] if padded else [])]


def _read_descriptions(descriptions: Any) -> dict[str, Any]:
    """The features with TensorFlow's types for names of types; raises UserError where one is not of `tf.io`."""
    if not isinstance(descriptions, Mapping) or not descriptions:
        raise UserError(
            f"features is a dict from names to features of tf.io; received {descriptions!r}. Write, for example, "
            f"tfdist.TFRecordSource.features = {{'image': {EXAMPLE}}}, and `import tensorflow as tf`."
        )
    found = {}
    for name, feature in descriptions.items():
        if not isinstance(feature, KINDS):
            raise UserError(f"features[{name!r}] is {feature!r}, which is not a feature of tf.io. Write {EXAMPLE}.")
        stored = STORED_TYPES.get(getattr(feature.dtype, "name", feature.dtype))
        if stored is None:
            raise UserError(
                f"features[{name!r}].dtype is {feature.dtype!r}; records hold {', '.join(STORED_TYPES)}. Write one of "
                "them, and change the type in transforms."
            )
        found[name] = feature._replace(dtype=stored)
    return found


def _parse(records: tf.Tensor, features: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """The features of a batch of serialized examples, string [n]; sparse and ragged ones are filled up with 0 or ''."""
    return {name: _densify(value) for name, value in tf.io.parse_example(records, features).items()}


def _check_record(record: bytes, features: Mapping[str, Any], where: str) -> None:
    """Raises UserError where a record does not fit, so that a mistake shows before the first step."""
    try:
        _parse(tf.constant([record]), features)
    except UnicodeDecodeError as error:  # the bytes of the record, which TensorFlow quotes
        raise UserError(f"{where} is not a tf.train.Example, which features describe. Write it again.") from error
    except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
        said = re.sub(r"{{.*?}}|Name: <unknown>,|\[Op:.*?\]", "", str(getattr(error, "message", error)))
        raise UserError(f"{where} does not fit features: {' '.join(said.split())}. Correct features.") from error


def _densify(value: Any) -> tf.Tensor:
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value)
    return value.to_tensor() if isinstance(value, tf.RaggedTensor) else value
