"""Looks at lines `label<TAB>text`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tfdist.data.formats.input_files import file_version
from tfdist.data.text.text import read_lines
from tfdist.new.found import Found, Given, classes_of, is_test

MOST_TOKENS = 256
MOST_WORDS = 10_000


def find(given: Given) -> Found:
    """The lines of a file, of which nearly all are used to their end."""
    given.without_target()
    lines = read_lines(file_version(given.file))
    labels = np.array(lines.labels)
    classes = classes_of("label", labels, None)
    test = is_test(len(lines))
    words = {word for text in lines.texts for word in text.lower().split()}
    length = int(np.ceil(np.quantile(lines.lengths, 0.98) / 8)) * 8

    def write_data(directory: Path) -> None:
        directory.mkdir()
        for split, chosen in {"train": ~test, "test": test}.items():
            rows = [f"{labels[i]}\t".encode() + lines.texts[i] + b"\n" for i in np.nonzero(chosen)[0]]
            (directory / f"{split}.tsv").write_bytes(b"".join(rows))

    return Found(
        kind="text",
        told=f"{len(lines):,} lines of text",
        target="label",
        classes=classes,
        num_training=int((~test).sum()),
        values={"length": min(length, MOST_TOKENS), "num_words": min(len(words) + 2, MOST_WORDS)},
        write_data=write_data,
    )
