"""Writes example lines of text from what ships with the dependencies: sentences of documentation, by library.

    python -m tfdist.examples.files.prepare_text [--out=data]

Makes OUT/sentences/{train-0,train-1,train-2,test}.tsv with lines `library<TAB>sentence`: sentences of the docstrings of
Keras, NumPy and scikit-learn as they are installed. Names of the libraries are left out of the sentences.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import pathlib
import re
import zlib
from collections.abc import Iterator

LIBRARIES = ("keras", "numpy", "sklearn")
MOST_SENTENCES = 2500  # of a library
SHORTEST, LONGEST = 6, 60  # words
TEST_EVERY = 5
FILES = 3
NAMES = re.compile(r"\b(keras|tf|tensorflow|numpy|np|sklearn|scikit-learn|scikit)\b[.\w]*", re.IGNORECASE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="data", type=pathlib.Path, help="the directory to write to")
    folder = parser.parse_args().out / "sentences"
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {f"{name}.tsv": [] for name in (*(f"train-{i}" for i in range(FILES)), "test")}
    for library in LIBRARIES:
        for sentence in choose_sentences(library):
            mark = zlib.crc32(sentence.encode())
            part = "test" if mark % TEST_EVERY == 0 else f"train-{mark // TEST_EVERY % FILES}"
            files[f"{part}.tsv"].append(f"{library}\t{sentence}\n")
    for name, lines in files.items():
        (folder / name).write_text("".join(lines), encoding="utf-8")
        print(f"{folder / name}: {len(lines)} lines")


def choose_sentences(library: str) -> list[str]:
    """Different sentences of a library, spread evenly over its modules."""
    found = list(dict.fromkeys(read_sentences(library)))
    step = max(1.0, len(found) / MOST_SENTENCES)
    return [found[int(i * step)] for i in range(min(MOST_SENTENCES, len(found)))]


def read_sentences(library: str) -> Iterator[str]:
    """The sentences of all docstrings, by module and line."""
    spec = importlib.util.find_spec(library)
    assert spec is not None and spec.origin is not None, f"{library} is not installed"
    for path in sorted(pathlib.Path(spec.origin).parent.rglob("*.py")):
        if "tests" in path.parts or path.stem.endswith("_test"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield from split_prose(ast.get_docstring(node) or "")


def split_prose(docstring: str) -> Iterator[str]:
    """Whole sentences of running text; neither code nor tables nor headings."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        if re.search(r">>>|```|---|===|\.\. |\|", paragraph):
            continue
        text = NAMES.sub("", " ".join(paragraph.split()))
        for sentence in re.findall(r"[A-Z][^.!?]+[.]", text):
            if SHORTEST <= len(sentence.split()) <= LONGEST:
                yield " ".join(sentence.split())


if __name__ == "__main__":
    main()
