"""Array files: which are mapped, what becomes of their types, and what is wrong with them."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from data_streams import global_batches

from tfdist.data.formats.array_files import ArrayFiles
from tfdist.errors import UserError

ROWS = 37


@pytest.fixture
def written(tmp_path: pathlib.Path) -> dict[str, Any]:
    arrays = {
        "x": np.arange(ROWS * 3, dtype=np.float64).reshape(ROWS, 3),
        "y": np.arange(ROWS, dtype=np.int32),
        "w": np.ones(ROWS, np.float32),
        "name": np.array([f"é{i}" for i in range(ROWS)]),
    }
    np.savez(tmp_path / "plain.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return {"plain": f"{tmp_path}/plain.npz", "npy": {name: f"{tmp_path}/{name}.npy" for name in arrays}}


def test_npy_files_are_mapped_and_float64_rows_become_float32(written: dict[str, Any]) -> None:
    source = ArrayFiles(written["npy"], inputs="x", targets="y")
    assert source.calls_python and "memory-mapped" in source.describe()[0]
    assert [spec.dtype.name for spec in source.structure] == ["float32", "int32"]
    assert global_batches(lambda: source, steps=1)[0][0].dtype == np.float32
    whole = ArrayFiles(pathlib.Path(written["plain"]), inputs="x", targets="y")
    assert not whole.calls_python and "read whole" in whole.describe()[0]


@pytest.mark.slow
def test_mistakes_have_messages(written: dict[str, Any], tmp_path: pathlib.Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    np.savez(tmp_path / "uneven.npz", x=np.zeros(3), y=np.zeros(4))
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}]), y=np.zeros(2))
    whole = pathlib.Path(written["plain"]).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    cases = [
        (f"{tmp_path}/none.npz", "'.*none.npz' cannot be read: No such file"),
        (f"{tmp_path}/broken.npz", "broken.npz is no .npz file"),
        (f"{tmp_path}/cut.npz", "cut.npz is no .npz file"),
        (f"{tmp_path}/x.csv", "a .npz file, or a dict of names"),
        (f"{tmp_path}/uneven.npz", r"same number of examples .*x float64\(3,\), y float64\(4,\)"),
        (f"{tmp_path}/objects.npz", "'x' of .*objects.npz cannot be read"),
        ({"x": f"{tmp_path}/broken.npy", "y": written["npy"]["y"]}, "broken.npy is no .npy file"),
        ({"x": f"{tmp_path}/none.npy", "y": written["npy"]["y"]}, "none.npy' cannot be read"),
    ]
    for path, message in cases:
        with pytest.raises(UserError, match=message):
            ArrayFiles(path, inputs="x", targets="y")
    with pytest.raises(UserError, match=r"has no column 'nam'.*Did you mean 'name'"):
        ArrayFiles(written["plain"], inputs="nam", targets="y")
