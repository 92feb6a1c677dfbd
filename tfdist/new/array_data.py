"""Looks at arrays in `.npz` and `.npy` files, which the experiment reads where they lie."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.errors import UserError
from tfdist.new.found import Found, Given, classes_of, is_test, target_among


def find(given: Given) -> Found:
    """The examples of an `.npz` file of two arrays, or of two `.npy` files, of which `--target` is one."""
    arrays = _loaded(given.file)
    if isinstance(arrays, np.ndarray):
        if given.target is None:
            raise UserError("--target is missing: which .npy file holds what is to be predicted? Write --target=FILE")
        target = given.target
        x, y, inputs = arrays, _loaded(target), None
    else:
        target = target_among(given.target, arrays.files, given.file)
        others = [name for name in arrays.files if name != target]
        if len(others) != 1:
            raise UserError(
                f"{given.file} has the arrays {others} besides {target!r}. Write a file with one of inputs."
            )
        inputs = others[0]
        with _readable(given.file):
            x, y = arrays[inputs], arrays[target]
    if not isinstance(y, np.ndarray) or y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or x.dtype.kind not in "biuf":
        raise UserError(
            f"The inputs are numbers [n, …] and the target is [n]; received {x.dtype}{x.shape} and "
            f"{getattr(y, 'dtype', '')}{getattr(y, 'shape', ' an archive')}. Write one value a row into the target."
        )
    classes = classes_of(target, y, given.predict)
    return Found(
        kind="arrays",
        told=f"{x.dtype}{list(x.shape[1:])} of {len(x):,} examples",
        target=Path(target).stem if inputs is None else target,
        classes=classes,
        num_training=int((~is_test(len(y))).sum()),
        values={
            "x_file": str(Path(given.file).resolve()),
            "y_file": str(Path(target).resolve()) if inputs is None else None,
            "x_name": inputs,
            "y_name": target,
        },
    )


def _loaded(path: str) -> Any:
    with _readable(path):
        return np.load(path, mmap_mode="r", allow_pickle=False)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Raises UserError for what NumPy raises; an archive's arrays are read when they are asked for."""
    try:
        yield
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is no .npy or .npz file of numbers that can be read: {error}") from error
