"""Lines of text and their labels: token ids by a vocabulary that is fitted once and kept with the run.

Invariant: how far a batch is padded depends on the lines of the global batch alone, so that every replica computes on
the same ids as one device would. Id 0 is padding, 1 a word that is not in the vocabulary.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.formats.input_files import Patterns, find_files, read_whole
from tfdist.data.sources.failures import call_python
from tfdist.data.sources.source import Order, Preprocessing, Reader, Source, StagedReader, load_or_fit
from tfdist.errors import UserError, build_user_error, suggest
from tfdist.settings.checks import DIFFERENT_NAMES, one_of, or_none, whole_number
from tfdist.storage.contents import FileVersion

STANDARDS = ("lower", "strip_punctuation", "lower_and_strip_punctuation")
SPLITS = ("whitespace", "character")
FIT_VERSION = 1
FIT_LINES = 4096
SEPARATOR = b"\t"


@dataclasses.dataclass(frozen=True)
class _FittedText:
    """The fitted values of a run's lines."""

    labels: list[str] | None
    vocabulary: list[str]


class Line(NamedTuple):
    """A line of a file, which are counted from 1."""

    path: str
    number: int
    label: str
    text: bytes


class TextLines(Source):
    """One example a line: `(ids, label)`, int32 [n, length] and int32 [n]. The files are held in memory.

    Lines are `label<TAB>text`. Example:

        train.train_data = @train/text.TextLines
        train.eval_data = @test/text.TextLines
        text.TextLines.fitted_on = %TRAIN_FILES
        train/text.TextLines.files = %TRAIN_FILES
        test/text.TextLines.files = 'data/test-*.tsv'

    Args:
      files: a path or pattern, local or gs://, or a list of them.
      fitted_on: the training files, from which the vocabulary and the labels are taken; all splits name the same ones.
      vocabulary_size: ids in use at most, 0 and 1 included: what the model's Embedding needs.
      max_length: tokens of a line that are used.
      pad_to_max: pads every batch to `max_length`, as strategies with static shapes need it, and not just to the
        longest line of the batch.
      bucket_batches: in training, lines are exchanged among so many batches, so that each holds lines of like length;
        0 leaves them as they come.
      labels: in the order of their indices; None takes those of the training lines, sorted.
      standardize: "lower_and_strip_punctuation", "lower", "strip_punctuation", or None.
      split: "whitespace" or "character".

    Raises:
      UserError: there are no such files or lines, or a label that the training lines have not.
    """

    calls_python = True

    def __init__(
        self,
        *,
        files: Patterns,
        fitted_on: Patterns,
        vocabulary_size: int = 10_000,
        max_length: int = 256,
        pad_to_max: bool = False,
        bucket_batches: int = 0,
        labels: Sequence[str] | None = None,
        standardize: str | None = "lower_and_strip_punctuation",
        split: str = "whitespace",
    ) -> None:
        whole_number(3)("TextLines.vocabulary_size", vocabulary_size)
        whole_number(1)("TextLines.max_length", max_length)
        whole_number(0)("TextLines.bucket_batches", bucket_batches)
        or_none(one_of(*STANDARDS))("TextLines.standardize", standardize)
        one_of(*SPLITS)("TextLines.split", split)
        or_none(DIFFERENT_NAMES)("TextLines.labels", labels)
        self._files = find_files(files, "TextLines.files")
        read = fit = [read_lines(file) for file in self._files]
        if fitted_on != files:
            fit = [read_lines(file) for file in find_files(fitted_on, "TextLines.fitted_on")]
        self.file_sizes = tuple(map(len, read))
        self.num_examples = sum(self.file_sizes)
        if not self.num_examples:
            raise build_user_error(f"The files {files!r} have no lines.", error_id="no-examples")
        self.labels = list(map(str, labels or [])) or sorted({line.label for lines in fit for line in lines})
        self._fit_texts = [line.text for lines in fit for line in lines]
        self._texts = np.array([line.text for lines in read for line in lines], dtype=object)
        self._classes = np.array(_index_labels(itertools.chain(*read), self.labels), np.int32)
        # Words or characters: as many tokens as a text has, or more.
        count = (lambda text: text.split()) if split == "whitespace" else (lambda text: text.decode())
        self._lengths = np.minimum([len(count(text)) for text in self._texts], max_length).astype(np.int32)
        self._max_length, self._pad_to_max, self._bucket_batches = max_length, pad_to_max, bucket_batches
        self._settings = {"max_tokens": vocabulary_size, "standardize": standardize, "split": split}
        self._fitted_on = fitted_on
        self._vocabulary: list[str] | None = None
        ids = tf.TensorSpec([None, max_length if pad_to_max else None], tf.int32)
        self.structure = (ids, tf.TensorSpec([None], tf.int32))

    @property
    def vocabulary(self) -> list[str]:
        """The words with the ids 2, 3, …, the frequent ones first; fitted the first time, unless `prepare` found it."""
        if self._vocabulary is None:
            layer = keras.layers.TextVectorization(**self._settings)
            layer.adapt(tf.data.Dataset.from_tensor_slices(self._fit_texts).batch(FIT_LINES))
            self._vocabulary = [str(word) for word in layer.get_vocabulary(include_special_tokens=False)]
            if not self._vocabulary:
                raise UserError(
                    f"The lines of {self._fitted_on!r} have no words: tfdist.TextLines.standardize = "
                    f"{self._settings['standardize']!r} takes every sign out. Write None there, or other lines."
                )
            self._fit_texts = []  # which may be other files, and need no memory any more
        return self._vocabulary

    def prepare(self, directory: str) -> None:
        """Takes the vocabulary from `directory`, where the first who comes leaves it."""
        settings = [FIT_VERSION, self._fitted_on, self._settings]
        path, fitted = load_or_fit(
            directory, "text", settings, _FittedText, lambda: _FittedText(self.labels, self.vocabulary)
        )
        if fitted.labels != self.labels:
            raise UserError(
                f"The run was begun with the labels {fitted.labels} ({path}), but the files now give {self.labels}. "
                "Write tfdist.TextLines.labels in the run's order, or take another --run_dir."
            )
        self._vocabulary, self._fit_texts = fitted.vocabulary, []

    def reader(self, order: Order) -> Reader:
        """Reads lines by Python, and turns them into ids by `TextVectorization`."""

        @functools.lru_cache(maxsize=2)
        def order_lines(epoch: int) -> np.ndarray:
            if order.seed is None:
                return np.arange(self.num_examples)
            return permute_by_length(self._lengths, order.batch_size, self._bucket_batches, (order.seed, epoch))

        vectorize = keras.layers.TextVectorization(vocabulary=self.vocabulary, **self._settings)

        @functools.lru_cache(maxsize=64)
        def width(batch: int, epoch: int) -> int:
            first = batch * order.batch_size
            return max(1, int(self._lengths[order_lines(epoch)[first : first + order.batch_size]].max()))

        def read_lines(positions: np.ndarray, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            chosen = order_lines(int(epoch))[positions]
            padded = self._max_length if self._pad_to_max else width(int(positions[0]) // order.batch_size, int(epoch))
            return self._texts[chosen], self._classes[chosen], np.asarray(padded, np.int32)

        specs = (tf.TensorSpec([None], tf.string), self.structure[1], tf.TensorSpec([], tf.int32))

        def fetch_lines(positions: tf.Tensor, epoch: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return call_python(read_lines, [positions, epoch], specs)

        def decode(lines: tuple[tf.Tensor, ...]) -> Any:
            texts, classes, padded = lines
            return tf.ensure_shape(_pad(vectorize(texts), padded), self.structure[0].shape), classes

        return StagedReader(fetch_lines, decode)

    def preprocessing(self) -> Preprocessing:
        """Turns texts into ids as training does."""
        kept = tf.Module()
        kept.vectorize = vectorize = keras.layers.TextVectorization(vocabulary=self.vocabulary, **self._settings)

        def ids(raw: Mapping[str, tf.Tensor]) -> tf.Tensor:
            found = vectorize(raw["text"])
            length = self._max_length if self._pad_to_max else tf.minimum(tf.shape(found)[1], self._max_length)
            return tf.ensure_shape(_pad(found, length), self.structure[0].shape)

        def first(count: int) -> dict[str, np.ndarray]:
            return {"text": self._texts[:count]}

        return Preprocessing({"text": tf.TensorSpec([None], tf.string, name="text")}, ids, kept, first)

    def describe(self) -> list[str]:
        """Counts lines, and lists vocabulary and labels."""
        counts = np.bincount(self._classes, minlength=len(self.labels))
        return [
            f"{len(self._files)} files, {sum(file.num_bytes for file in self._files):,} bytes; lines of up to "
            f"{int(self._lengths.max())} tokens, {self._lengths.mean():.1f} in the mean",
            f"ids 0 (padding), 1 (unknown) … {len(self.vocabulary) + 1}: {', '.join(self.vocabulary[:6])}, …",
            "labels: "
            + ", ".join(f"{i} {n} ({c:,})" for i, (n, c) in enumerate(zip(self.labels, counts, strict=True))),
        ]


def permute_by_length(lengths: np.ndarray, batch_size: int, window_batches: int, key: tuple[int, ...]) -> np.ndarray:
    """The lines of an epoch in their order, int64 [n]: permuted, and exchanged within windows of so many batches.

    Within a window the lines are sorted by length and dealt out to its batches, which are permuted. What is left over
    behind the last full batch stays as it was drawn. 0 batches exchange nothing.
    """
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    order = draw.permutation(len(lengths))
    num_batches = len(lengths) // batch_size if window_batches else 0
    for first in range(0, num_batches, window_batches or 1):
        last = min(first + window_batches, num_batches)
        part = order[first * batch_size : last * batch_size]
        batches = part[np.argsort(lengths[part], kind="stable")].reshape(-1, batch_size)
        part[:] = draw.permuted(batches, axis=1)[draw.permutation(last - first)].reshape(-1)
    return order


def _pad(ids: tf.Tensor, length: Any) -> tf.Tensor:
    """int32 ids [n, length], cut or filled up with 0."""
    ids = tf.cast(ids, tf.int32)[:, :length]
    return tf.pad(ids, [[0, 0], [0, length - tf.shape(ids)[1]]])


def _index_labels(lines: Iterable[Line], labels: Sequence[str]) -> list[int]:
    """The labels of lines as indices into `labels`."""
    known, indices = {name: index for index, name in enumerate(labels)}, []
    for path, number, name, _ in lines:
        if name not in known:
            raise UserError(
                f"{path}:{number}: the label {name!r} is not among the training lines' {list(labels)}."
                f"{suggest(name, labels)}"
            )
        indices.append(known[name])
    return indices


def read_lines(file: FileVersion) -> list[Line]:
    """The lines `label<TAB>text` of a file that are not empty.

    Raises:
      UserError: the file cannot be read, or a line has no tab, no label or no text.
    """
    lines = []
    data = read_whole(file).removeprefix(codecs.BOM_UTF8)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file.path}:{number} is not UTF-8: {error.reason}. Write the file in UTF-8.") from error
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        label, separator, text = line.rstrip(b"\r").partition(SEPARATOR)
        label = label.strip()
        if not (label and text.strip()):
            problem = "no label" if separator and not label else "no text" if separator else "no '\\t'"
            raise UserError(
                f"{file.path}:{number} has {problem}: {line.decode()[:60]!r}. A line is a label, a tab and a text."
            )
        lines.append(Line(file.path, number, sys.intern(label.decode()), text))
    return lines
