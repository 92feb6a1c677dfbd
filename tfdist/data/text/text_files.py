"""Files of lines, read whole: texts, how many tokens each can have, and which label it has. Empty lines are none."""

from __future__ import annotations

import codecs
import dataclasses

import numpy as np

from tfdist.data.formats.input_files import read_whole
from tfdist.errors import UserError
from tfdist.storage.contents import FileVersion

SPLITS = ("whitespace", "character")


@dataclasses.dataclass(frozen=True, eq=False)
class TextFile:
    """The lines of one file.

    Attributes:
      file: where it lies.
      texts: without labels and ends of lines.
      lengths: int32 [n], words or characters of each text: as many tokens as it has, or more.
      labels: int32 [n], the label of each as an index into `names`.
      names: the labels that occur.
      first_lines: on which line each of `names` stands first.
    """

    file: FileVersion
    texts: list[bytes]
    lengths: np.ndarray
    labels: np.ndarray
    names: list[str]
    first_lines: list[int]

    def __len__(self) -> int:
        return len(self.texts)


def read_lines(file: FileVersion, *, separator: str, split: str, label: str | None = None) -> TextFile:
    """Reads a file of lines `label`, separator, `text`; with a `label`, of texts of that label.

    Raises:
      UserError: the file cannot be read, or a line has no separator, no label or no text.
    """
    texts, lengths, labels = [], [], []
    first_lines: dict[bytes, int] = {}
    codes: dict[bytes, int] = {}
    data = read_whole(file).removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(data.split(b"\n"), 1):
        content = line.rstrip(b"\r")
        if not content.strip():
            continue
        if label is None:
            name, text = _cut(content, separator.encode(), f"{file.path}:{number}")
        else:
            name, text = label.encode(), content
        first_lines.setdefault(name, number)
        texts.append(text)
        lengths.append(len(text.split()) if split == "whitespace" else len(text.decode("utf-8", "replace")))
        labels.append(codes.setdefault(name, len(codes)))
    names = [name.decode("utf-8", "replace") for name in codes]
    counts, indices = np.array(lengths, np.int32), np.array(labels, np.int32)
    return TextFile(file, texts, counts, indices, names, list(first_lines.values()))


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
