"""What was found in the data: enough to write an experiment for it.

Invariant: the same examples are held out for testing by every kind of data: a fifth, drawn once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import UserError, suggest

KINDS = ("table", "images", "text", "arrays", "tfds")
PREDICTIONS = ("class", "number")
_ENDINGS = {
    "table": (".csv", ".tsv", ".parquet", ".pq"),
    "text": (".txt",),
    "arrays": (".npz", ".npy"),
}
_MAX_CLASSES = 100
_MIN_EXAMPLES_PER_CLASS = 10


@dataclasses.dataclass(frozen=True)
class DataRequest:
    """Flags that name the data and the target: `--data`, `--file`, `--target` and `--predict`."""

    kind: str
    file: str
    target: str | None
    predict: str | None

    def refuse_target(self) -> None:
        """Raises UserError where a target was named for data that tells it by itself."""
        for flag, value in {"target": self.target, "predict": self.predict}.items():
            if value is not None:
                raise UserError(f"--{flag}={value}: {self.kind} data have a class for each example. Leave it out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDescription:
    """The description of data that was inspected.

    Attributes:
      kind: of KINDS, which names the template.
      summary: the data in a few words.
      target: what is predicted, in a word.
      classes: the values of the target in the order of their labels; None for a number.
      num_training: examples to train on.
      values: what the module's template needs besides.
      write_data: writes what training and testing read into a directory.
      note: what the user should know of it; empty where there is nothing.
    """

    kind: str
    summary: str
    target: str
    classes: Sequence[Any] | None
    num_training: int
    values: Mapping[str, Any]
    write_data: Callable[[Path], None] | None = None
    note: str = ""


def draw_test_mask(num_examples: int) -> np.ndarray:
    """Returns which examples are for testing, bool [n]."""
    return np.random.default_rng(0).permutation(num_examples) < num_examples / 5


def find_classes(target: str, values: np.ndarray, predict: str | None) -> list[Any] | None:
    """The classes among a target's values, sorted; None where it is a number.

    Whole numbers are classes where there are few of them, each of many examples, unless `predict` decides.

    Raises:
      UserError: there is but one value, or `predict` cannot be had.
    """
    classes = np.unique(values)
    if len(classes) < 2:
        raise UserError(f"{target!r} has no two values, but {classes.tolist()}: there is nothing to predict.")
    is_float = values.dtype.kind == "f"
    if predict is None:
        few = len(classes) <= _MAX_CLASSES and len(values) >= _MIN_EXAMPLES_PER_CLASS * len(classes)
        predict = "number" if is_float or (values.dtype.kind in "iu" and not few) else "class"
    if predict == "class":
        if is_float:
            raise UserError(
                f"{target!r} holds numbers with fractions, which are no classes. Leave out --predict=class."
            )
        return classes.tolist()
    if values.dtype.kind not in "iuf":
        raise UserError(f"{target!r} holds {classes[0]!r} and so on, no numbers. Leave out --predict=number.")
    return None


def find_kind(file: str) -> str:
    """Finds the kind of data by the file's ending, "images" for a directory; raises UserError if it is unknown."""
    path = Path(file)
    if path.is_dir():
        return "images"
    if not path.exists():
        raise UserError(f"There is no file {file!r}. Write --file=FILE, or --data=tfds for the name of a data set.")
    for kind, endings in _ENDINGS.items():
        if path.suffix.lower() in endings:
            return kind
    known = ", ".join(f"{kind} ({', '.join(endings)})" for kind, endings in _ENDINGS.items())
    raise UserError(f"{file} is of no kind that its ending tells: {known}, images (a directory). Write --data=KIND")


def find_target(name: str | None, names: Sequence[str], where: str) -> str:
    """The name of what is predicted; raises UserError where it is none of the names."""
    if name is not None and name in names:
        return name
    problem = f"--target={name} is not there.{suggest(name, names)}" if name else "--target is missing."
    known = f"has {', '.join(names)}. Write --target={names[-1]}" if names else "has no column with values."
    raise UserError(f"{problem} {where} {known}")
