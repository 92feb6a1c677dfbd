"""Predictions as files: one for so many steps, whole or not there at all.

Invariant: what stands in the files of a directory whose predictions.json names the same weights and data, and their
sizes, is right, and the first examples of the data, without gaps; so a start goes on behind the last file.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import UserError, check_package
from tfdist.storage import files
from tfdist.telemetry.json_text import from_json, to_json
from tfdist.telemetry.records import Warn, read_record

EXAMPLE = "example"  # the column of the examples' numbers, in their own order
SUMMARY = "predictions.json"


def _as_json_lines(columns: Mapping[str, np.ndarray]) -> bytes:
    lists = {name: column.tolist() for name, column in columns.items()}
    rows = (dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True))
    return "".join(f"{to_json(row)}\n" for row in rows).encode()


def _as_npz(columns: Mapping[str, np.ndarray]) -> bytes:
    held = io.BytesIO()
    arrays: dict[str, Any] = dict(columns)
    np.savez(held, **arrays)
    return held.getvalue()


def _as_parquet(columns: Mapping[str, np.ndarray]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    def column_of(array: np.ndarray) -> pyarrow.Array:
        made = pyarrow.array(array.ravel())
        if not array.size:  # which has no lists of a fixed size
            return pyarrow.array(array.tolist())
        for size in reversed(array.shape[1:]):
            made = pyarrow.FixedSizeListArray.from_arrays(made, size)
        return made

    held = io.BytesIO()
    parquet.write_table(pyarrow.table({name: column_of(array) for name, array in columns.items()}), held)
    return held.getvalue()


WRITERS = {"jsonl": _as_json_lines, "npz": _as_npz, "parquet": _as_parquet}


def check_format(name: str) -> None:
    """Raises UserError where a package is missing that writes this format."""
    if name == "parquet":
        check_package("pyarrow", "pyarrow", "tables", "predict.format = 'parquet'")


@dataclasses.dataclass(frozen=True)
class Summary:
    """The content of predictions.json.

    Attributes:
      about: what the predictions are of.
      num_examples: of all files, once they are `done`.
      sizes: of the files in bytes.
    """

    about: Mapping[str, Any]
    num_examples: int | None = None
    done: bool = False
    sizes: Sequence[int] = ()


class PredictionFiles:
    """The files of one prediction, on the chief.

    Args:
      directory: local or gs://.
      kind: a key of `WRITERS`.
      about: what the predictions are of; other files in the directory are removed where it differs.
      steps_per_file: of the plan.
    """

    def __init__(self, directory: str, kind: str, about: Mapping[str, Any], *, steps_per_file: int) -> None:
        self._directory, self._kind, self._steps = directory, kind, steps_per_file
        self._about = from_json(to_json(dict(about) | {"format": kind, "steps_per_file": steps_per_file}))
        self._sizes: list[int] = []
        self._held: list[Mapping[str, np.ndarray]] = []

    def resume_or_clear(self, warn: Warn) -> int:
        """Returns of how many steps there are files; clears a directory whose predictions have other settings."""
        summary = read_record(files.join(self._directory, SUMMARY), Summary, warn)
        if summary is not None and summary.about == self._about:
            for size in summary.sizes:
                path = files.join(self._directory, self._name(len(self._sizes)))
                if not files.exists(path) or files.stat(path).num_bytes != size:
                    warn(f"{path} is not as it was written, and is predicted again.")
                    break
                self._sizes.append(size)
            return len(self._sizes) * self._steps
        if files.is_dir(self._directory):
            files.remove_tree(self._directory)
        files.make_dirs(self._directory)
        self.write_summary()
        return 0

    def add(self, step: int, columns: Mapping[str, np.ndarray], *, first: int, is_last: bool) -> None:
        """Takes the outputs of a step, arrays [n, …] by name, whose first example has the number `first`."""
        count = len(next(iter(columns.values())))
        self._held.append({EXAMPLE: np.arange(first, first + count, dtype=np.int64), **columns})
        if is_last or (step + 1) % self._steps == 0:
            whole = {name: join_rows(name, [each[name] for each in self._held]) for name in self._held[0]}
            self._held = []
            path = files.join(self._directory, self._name(len(self._sizes)))
            content = WRITERS[self._kind](whole)
            files.write_atomic(path, content)
            self._sizes.append(len(content))
            self.write_summary()

    def _name(self, index: int) -> str:
        return f"part-{index:05d}.{self._kind}"

    def write_summary(self, num_examples: int | None = None) -> None:
        """Writes predictions.json; with the number of examples, which makes the files complete."""
        summary = Summary(self._about, num_examples, num_examples is not None, self._sizes)
        files.write_atomic(files.join(self._directory, SUMMARY), to_json(summary, indent=2) + "\n")


def join_rows(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins parts [n, …] of a column; raises UserError where the sizes of an example's output differ."""
    if len({part.shape[1:] for part in parts}) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted({part.shape[1:] for part in parts})[:2])
        raise UserError(
            f"The model's output {name!r} is of {shown} for different examples; predictions need one size. Pad the "
            "data to one length, as tfdist.TextLines.pad_to_max = True does."
        )
    return np.concatenate(parts)


def check_output(name: str, value: Any, num_examples: int | None) -> None:
    """Raises UserError where an output, a tensor, cannot stand in a column with a row for each example."""
    if name == EXAMPLE or np.dtype(value.dtype.as_numpy_dtype).kind not in "iufb":
        raise UserError(
            f"The model's output {name!r} is {value.dtype.name}{list(value.shape)}; predictions are numbers, in "
            f"columns with other names than {EXAMPLE!r}."
        )
    if value.shape.rank == 0 or value.shape[0] not in (None, num_examples):
        raise UserError(
            f"The model's output {name!r} is of {list(value.shape)}, and does not have a row for each example. "
            "Leave it out of the model's outputs."
        )
