"""Arrays in `.npy` and `.npz` files.

Invariant: of a local `.npy` file a worker reads the rows of its own batches and no others. Archives and objects of a
bucket are read whole, once, when the source is made.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.formats.input_files import PathLike, expand_path
from tfdist.data.sources.arrays import ArraySource
from tfdist.data.sources.augment import Augmentation, LayerBuilder
from tfdist.data.sources.columns import Columns, Names
from tfdist.data.sources.failures import call_python
from tfdist.errors import UserError
from tfdist.storage import files


class ArrayFiles(ArraySource):
    """Named arrays whose first axis counts the examples. A data function of a gin file:

        train.train_data = @array_files.ArrayFiles
        array_files.ArrayFiles.path = 'train.npz'
        array_files.ArrayFiles.inputs = 'images'
        array_files.ArrayFiles.targets = 'labels'

    Args:
      path: a `.npz` file, or a dict of names to `.npy` files; local or gs://.
      inputs: the array that is x, or several, which then make a dict.
      targets: the same for y.
      weights: the array of the sample weights; None weighs every example alike.
      augmentation: builders of Keras layers that change the inputs while training, see `augment.py`.

    Raises:
      UserError: a file is missing or no array file, a name is in none, or the lengths differ.
    """

    def __init__(
        self,
        path: PathLike | Mapping[str, PathLike],
        *,
        inputs: Names,
        targets: Names,
        weights: str | None = None,
        augmentation: Sequence[LayerBuilder] = (),
    ) -> None:
        paths = {n: expand_path(p) for n, p in path.items()} if isinstance(path, Mapping) else expand_path(path)
        columns = Columns(inputs, targets, weights)
        self._location = paths if isinstance(paths, str) else ", ".join(paths.values())
        arrays = _load_arrays(paths, columns, self._location)
        sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(sizes.values())) != 1 or any(array.dtype == object for array in arrays.values()):
            raise UserError(
                f"The arrays of {self._location} must be of numbers or text and hold the same number of examples along "
                f"their first axis; received {', '.join(f'{name} {a.dtype}{a.shape}' for name, a in arrays.items())}."
            )
        selected = columns.select(arrays)
        self.calls_python = any(isinstance(array, np.memmap) for array in arrays.values())
        super().__init__(tf.nest.map_structure(lambda a: a[:1], selected) if self.calls_python else selected)
        if self.calls_python:  # the rows are read when they are wanted
            self._arrays, self.num_examples = selected, next(iter(sizes.values()))
        self.augment = Augmentation(augmentation, self.structure) if augmentation else None

    def gatherer(self) -> Callable[[tf.Tensor], Any]:
        """Reads the rows from their files, where these are mapped."""
        if not self.calls_python:
            return super().gatherer()
        arrays = tf.nest.flatten(self._arrays)
        specs = tf.nest.flatten(self.structure)

        def read_rows(indices: np.ndarray) -> list[np.ndarray]:
            return [_convert_rows(array, indices, spec.dtype) for array, spec in zip(arrays, specs, strict=True)]

        return lambda indices: call_python(read_rows, [indices], self.structure)

    def describe(self) -> list[str]:
        """Counts the rows, and says how they are read."""
        how = "memory-mapped: a worker reads the rows of its own batches" if self.calls_python else "read whole"
        return [f"{self._location}: {self.num_examples:,} rows, {how}"]


def _load_arrays(path: str | Mapping[str, str], columns: Columns, where: str) -> dict[str, np.ndarray]:
    if not isinstance(path, str):
        columns.check(list(path), where)
        return {name: load_array_file(path[name]) for name in columns.names}
    if not path.endswith(".npz"):
        raise UserError(
            f"ArrayFiles.path is a .npz file, or a dict of names to .npy files such as {{'x': 'x.npy', 'y': 'y.npy'}}; "
            f"received {path!r}."
        )
    with load_array_file(path) as archive:
        columns.check(archive.files, where)
        return {name: read_member(archive, name, path) for name in columns.names}


def read_member(archive: Any, name: str, path: str) -> np.ndarray:
    """Reads an array of an archive; raises UserError where it cannot be read."""
    try:
        return archive[name]
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"The array {name!r} of {path} cannot be read: {error}. Write it with np.savez.") from error


def load_array_file(path: str) -> Any:
    """An array, mapped where it is a local file of its own, or an archive of arrays; raises UserError for others."""
    try:
        source = io.BytesIO(files.read(path)) if files.is_remote(path) else path
        loaded = np.load(source, mmap_mode=None if files.is_remote(path) else "r", allow_pickle=False)
        if hasattr(loaded, "files") != path.endswith(".npz"):
            raise ValueError("its content is of the other kind")
        return loaded
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        kind, writer = (".npz", "np.savez") if path.endswith(".npz") else (".npy", "np.save")
        raise UserError(
            f"{path} is no {kind} file, or a damaged one: {error}. Write it again with {writer}."
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"The array file {path!r} cannot be read: {reason}. Check its path.") from error


def _convert_rows(array: np.ndarray, indices: np.ndarray, dtype: tf.DType) -> np.ndarray:
    rows = array[indices]
    return (
        np.char.encode(rows).astype(object) if rows.dtype.kind == "U" else rows.astype(dtype.as_numpy_dtype, copy=False)
    )
