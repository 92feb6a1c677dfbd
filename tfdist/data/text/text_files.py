"""Files of lines, of which runs are read by their place in the file.

A file is scanned once: where each text begins, how many tokens it can have, which label it has. The result is kept in
the user's cache. Empty lines are none.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
from typing import Any

import numpy as np

from tfdist.data.cache.index_cache import Arrays, cached
from tfdist.data.formats.byte_ranges import FileVersion
from tfdist.data.formats.input_files import read_exactly, scan
from tfdist.errors import UserError

VERSION = "text 2"
SPLITS = ("whitespace", "character")


@dataclasses.dataclass(frozen=True, eq=False)
class TextFile:
    """The lines of one file.

    Attributes:
      file: where it lies.
      begins: int64 [n], the first byte of each text.
      sizes: int64 [n], bytes of each text.
      lengths: int32 [n], words or characters of each text: as many tokens as it has, or more.
      labels: int32 [n], the label of each as an index into `names`.
      names: the labels that occur.
      first_lines: on which line each of `names` stands first.
    """

    file: FileVersion
    begins: np.ndarray
    sizes: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    names: list[str]
    first_lines: list[int]

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, first: int, count: int) -> list[bytes]:
        """The texts of neighboring lines, by one read."""
        begins, sizes = self.begins[first : first + count].tolist(), self.sizes[first : first + count].tolist()
        if not begins:
            return []
        data = read_exactly(self.file, begins[0], begins[-1] + sizes[-1] - begins[0])
        return [data[b - begins[0] : b - begins[0] + size] for b, size in zip(begins, sizes, strict=True)]


def open_lines(file: FileVersion, *, separator: str, split: str) -> TextFile:
    """A file of lines `label`, separator, `text`.

    Raises:
      UserError: a line has no separator, no label or no text.
    """
    index = cached(file, repr((VERSION, separator, split)), lambda: _scanned(file, separator.encode(), split, ""))
    return _text_file(file, index)


def open_class(file: FileVersion, *, label: str, split: str) -> TextFile:
    """A file whose lines are texts of one label."""
    index = cached(file, repr((VERSION, None, label, split)), lambda: _scanned(file, b"", split, label))
    return _text_file(file, index)


def _text_file(file: FileVersion, index: Arrays) -> TextFile:
    parts: dict[str, Any] = {name: index[name].tolist() for name in ("names", "first_lines")}
    parts |= {name: index[name] for name in ("begins", "sizes", "lengths", "labels")}
    return TextFile(file, **parts)


def _scanned(file: FileVersion, separator: bytes, split: str, only_label: str) -> Arrays:
    begins, sizes, lengths, labels = [], [], [], []
    codes: dict[bytes, int] = {}
    first_lines: list[int] = []
    place, held, number = 0, b"", 0
    for part in itertools.chain(scan(file), [b""]):
        lines = (held + part).split(b"\n")
        held = lines.pop() if part else b""
        for line in lines:
            number += 1
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                line, place = line.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
            content = line.rstrip(b"\r")
            if content.strip():
                label, text = only_label.encode(), content
                if separator:
                    label, text = _cut(content, separator, f"{file.path}:{number}")
                if label not in codes:
                    codes[label] = len(codes)
                    first_lines.append(number)
                begins.append(place + len(content) - len(text))
                sizes.append(len(text))
                lengths.append(len(text.split()) if split == "whitespace" else len(text.decode("utf-8", "replace")))
                labels.append(codes[label])
            place += len(line) + 1
    return {
        "begins": np.array(begins, np.int64),
        "sizes": np.array(sizes, np.int64),
        "lengths": np.array(lengths, np.int32),
        "labels": np.array(labels, np.int32),
        "names": np.array([label.decode("utf-8", "replace") for label in codes], dtype=np.str_),
        "first_lines": np.array(first_lines, np.int64),
    }


def _cut(line: bytes, separator: bytes, where: str) -> tuple[bytes, bytes]:
    label, found, text = line.partition(separator)
    label = label.strip()
    if found and label and text.strip():
        return label, text
    problem = "no label" if found and not label else "no text" if found else f"no {separator.decode()!r}"
    raise UserError(
        f"{where} has {problem}: {line[:60].decode('utf-8', 'replace')!r}. A line is a label, "
        f"{separator.decode()!r} (TextLines.separator) and a text."
    )
