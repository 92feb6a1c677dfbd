"""Looks at a table: which columns are numbers and categories, and what is to be predicted.

Invariant: what is written holds the columns in use alone, under names that TensorFlow takes, as Parquet, which keeps
their types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.data.formats.input_files import file_version
from tfdist.data.tables.table_files import BOOLEAN, FLOAT, INTEGER, NUMERIC, STRING, find_kinds, read_table
from tfdist.errors import UserError
from tfdist.new.description import DataDescription, DataRequest, draw_test_mask, find_classes, find_target

OTHER_INDICES = 2  # of a category: values that the training rows lack, and missing ones


def inspect(request: DataRequest) -> DataDescription:
    """Describes a CSV or Parquet table, without the rows whose target is missing."""
    table = read_table(file_version(request.file))
    import pyarrow
    from pyarrow import compute

    kinds = find_kinds(table)
    names = [name for name, kind in kinds.items() if kind in (*NUMERIC, STRING)]
    if not table.num_rows:
        raise UserError(f"{request.file} has no rows below the names of its columns. Write a table with some.")
    if len(kinds) == 1 and (other := set(";\t|").intersection(*kinds)):
        raise UserError(
            f"{request.file} has one column, {', '.join(kinds)!r}: {min(other)!r} separates no columns here. "
            "Write the file with commas between columns and points in numbers, or, named .tsv, with tabs."
        )
    target = find_target(request.target, names, request.file)
    rows = table.select(names)
    if kinds[target] == FLOAT:  # decimals are, too
        place, numbers = rows.column_names.index(target), rows[target].cast(pyarrow.float64())
        rows = rows.set_column(place, target, compute.if_else(compute.is_nan(numbers), None, numbers))
        if compute.any(compute.is_inf(numbers)).as_py():
            raise UserError(f"{request.file} has infinite numbers in {target!r}. Leave out these rows.")
    rows = rows.filter(compute.is_valid(rows[target]))
    if kinds[target] == FLOAT and _are_whole(rows[target].to_numpy()):
        rows = rows.set_column(rows.column_names.index(target), target, rows[target].cast(pyarrow.int64()))
    classes = find_classes(target, rows[target].to_numpy(), request.predict)
    test = draw_test_mask(len(rows))
    parts = {"train": rows.filter(pyarrow.array(~test)), "test": rows.filter(pyarrow.array(test))}
    columns = _choose_inputs(kinds, parts["train"], target)
    inputs = [*columns["numbers"], *columns["categories"]]
    if not inputs:
        raise UserError(f"{request.file} has no column besides {target!r} that could tell it.")
    written = _written_names([*inputs, target])

    def write_data(directory: Path) -> None:
        from pyarrow import parquet

        directory.mkdir()
        for split, part in parts.items():
            chosen = part.select([*inputs, target]).rename_columns([written[name] for name in (*inputs, target)])
            parquet.write_table(chosen, directory / f"{split}.parquet", row_group_size=4096)

    known = parts["train"][target].to_numpy()
    left_out = sorted(set(kinds) - {target, *inputs})
    return DataDescription(
        kind="table",
        summary=f"{len(inputs)} columns of {len(rows):,} rows",
        note=f"left out, for they are constant or differ in most rows: {', '.join(left_out)}" * bool(left_out),
        target=target,
        classes=classes,
        num_training=len(known),
        values={
            "column": written[target],
            "numbers": [written[name] for name in columns["numbers"]],
            "categories": {written[name]: size for name, size in columns["categories"].items()},
            "mean": None if classes else float(f"{np.mean(known):.4g}"),
            "deviation": None if classes else float(f"{np.std(known):.4g}") or 1.0,
        },
        write_data=write_data,
    )


def _are_whole(values: np.ndarray) -> bool:
    """Whether fractions are none: pandas writes whole numbers so where some are missing."""
    return bool((np.abs(values) < 2**53).all() and (values == np.floor(values)).all())


def _choose_inputs(kinds: Mapping[str, str], training_rows: Any, target: str) -> dict[str, Any]:
    """Chooses `numbers`, and `categories` with vocabulary sizes; omits constants and texts that differ in most rows."""
    numbers, categories = [], {}
    for name in training_rows.column_names:
        known = training_rows[name].drop_null().unique()
        if name == target or len(known) < 2:
            continue
        if kinds[name] in (INTEGER, FLOAT):
            numbers.append(name)
        elif kinds[name] == BOOLEAN or 2 * len(known) <= len(training_rows):
            categories[name] = len(known) + OTHER_INDICES
    return {"numbers": numbers, "categories": categories}


def _written_names(names: Sequence[str]) -> dict[str, str]:
    """The names of the columns in the files that are written: letters A to Z, digits and underscores.

    Where these do not tell a column from those before it, its number does.
    """
    written: dict[str, str] = {}
    for number, name in enumerate(names, 1):
        new = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
        while not new or new in written.values():
            new = f"{new or 'column'}_{number}"
        written[name] = new
    return written
