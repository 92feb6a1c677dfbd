"""Looks at lines `label<TAB>text`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tfdist.data.formats.input_files import file_version
from tfdist.data.text.text import read_lines
from tfdist.new.description import DataDescription, DataRequest, draw_test_mask, find_classes

MAX_TOKENS = 256
MAX_WORDS = 10_000


def inspect(request: DataRequest) -> DataDescription:
    """Describes a file of lines `label<TAB>text`; texts are cut to a length that suits nearly all."""
    request.refuse_target()
    lines = read_lines(file_version(request.file))
    labels = np.array([line.label for line in lines])
    classes = find_classes("label", labels, None)
    test = draw_test_mask(len(lines))
    words = {word for line in lines for word in line.text.lower().split()}
    length = int(np.ceil(np.quantile([len(line.text.split()) for line in lines], 0.98) / 8)) * 8

    def write_data(directory: Path) -> None:
        directory.mkdir()
        for split, chosen in {"train": ~test, "test": test}.items():
            rows = [f"{labels[i]}\t".encode() + lines[i].text + b"\n" for i in np.nonzero(chosen)[0]]
            (directory / f"{split}.tsv").write_bytes(b"".join(rows))

    return DataDescription(
        kind="text",
        summary=f"{len(lines):,} lines of text",
        target="label",
        classes=classes,
        num_training=int((~test).sum()),
        values={"length": min(length, MAX_TOKENS), "num_words": min(len(words) + 2, MAX_WORDS)},
        write_data=write_data,
    )
