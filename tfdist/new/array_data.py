"""Looks at arrays in `.npz` and `.npy` files, which the experiment reads where they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tfdist.data.formats.array_files import load_array_file, read_member
from tfdist.errors import UserError
from tfdist.new.description import DataDescription, DataRequest, draw_test_mask, find_classes, find_target


def inspect(request: DataRequest) -> DataDescription:
    """Describes the examples of an `.npz` file of two arrays, or of two `.npy` files, of which `--target` is one."""
    arrays = load_array_file(request.file)
    if isinstance(arrays, np.ndarray):
        if request.target is None:
            raise UserError("--target is missing: which .npy file holds what is to be predicted? Write --target=FILE")
        target = request.target
        x, y, inputs = arrays, load_array_file(target), None
    else:
        target = find_target(request.target, arrays.files, request.file)
        others = [name for name in arrays.files if name != target]
        if len(others) != 1:
            raise UserError(
                f"{request.file} has the arrays {others} besides {target!r}. Write a file with one of inputs."
            )
        inputs = others[0]
        x, y = (read_member(arrays, name, request.file) for name in (inputs, target))
    if not isinstance(y, np.ndarray) or y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or x.dtype.kind not in "biuf":
        raise UserError(
            f"The inputs are numbers [n, …] and the target is [n]; received {x.dtype}{x.shape} and "
            f"{getattr(y, 'dtype', '')}{getattr(y, 'shape', ' an archive')}. Write one value a row into the target."
        )
    classes = find_classes(target, y, request.predict)
    return DataDescription(
        kind="arrays",
        summary=f"{x.dtype}{list(x.shape[1:])} of {len(x):,} examples",
        target=Path(target).stem if inputs is None else target,
        classes=classes,
        num_training=int((~draw_test_mask(len(y))).sum()),
        values={
            "x_file": str(Path(request.file).resolve()),
            "y_file": str(Path(target).resolve()) if inputs is None else None,
            "x_name": inputs,
            "y_name": target,
        },
    )
