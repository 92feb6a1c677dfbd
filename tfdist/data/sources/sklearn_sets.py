"""Data sets that ship with scikit-learn: real data without a download, for examples and tests.

Each function returns arrays of one split. The split is stratified and fixed: which examples are for testing does not
depend on the experiment's seed.
"""

from __future__ import annotations

import importlib.resources
from typing import Any

import numpy as np

from tfdist.errors import check_package
from tfdist.settings.checks import one_of

SPLITS = ("train", "test", "all")
TEST_SHARE = 0.2
SPLIT_SEED = 0


def load_digits(*, split: str) -> tuple[np.ndarray, np.ndarray]:
    """1,797 handwritten digits: images float32 [n, 8, 8, 1] in 0…1, labels int32 [n] in 0…9.

    Args:
      split: "train", "test" or "all".

    Raises:
      UserError: `split` is none of these, or scikit-learn is missing.
    """
    data = _sklearn_datasets().load_digits()
    images = (data.images / 16.0).astype(np.float32)[..., np.newaxis]
    return _split(images, data.target.astype(np.int32), split)


def load_breast_cancer(*, split: str) -> tuple[np.ndarray, np.ndarray]:
    """569 tumors: 30 measurements float32 [n, 30], standardized over all rows; labels int32 [n], 1 is benign.

    Raises:
      UserError: as `load_digits`.
    """
    data = _sklearn_datasets().load_breast_cancer()
    rows = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
    return _split(rows.astype(np.float32), data.target.astype(np.int32), split)


def load_digits_and_parity(*, split: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The digits with two targets: "digit", int32 [n], and "odd", float32 [n, 1].

    Raises:
      UserError: as `load_digits`.
    """
    images, labels = load_digits(split=split)
    return images, {"digit": labels, "odd": (labels % 2).astype(np.float32)[:, np.newaxis]}


def load_descriptions(*, split: str) -> np.ndarray:
    """The bytes of scikit-learn's descriptions of its data sets, int32 [m], some 70,000; the last tenth is for testing.

    Raises:
      UserError: as `load_digits`.
    """
    folder = importlib.resources.files(_sklearn_datasets()) / "descr"
    texts = [
        entry.read_bytes() for entry in sorted(folder.iterdir(), key=lambda e: e.name) if entry.name.endswith(".rst")
    ]
    row = np.frombuffer(b"\n\n".join(texts), np.uint8).astype(np.int32)
    one_of(*SPLITS)("split", split)
    border = len(row) * 9 // 10
    return {"train": row[:border], "test": row[border:], "all": row}[split]


def _sklearn_datasets() -> Any:
    check_package("sklearn", "scikit-learn", "examples", "This data set")
    from sklearn import datasets

    return datasets


def _split(x: np.ndarray, y: np.ndarray, split: str) -> tuple[np.ndarray, np.ndarray]:
    one_of(*SPLITS)("split", split)
    if split == "all":
        return x, y
    from sklearn.model_selection import train_test_split

    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=TEST_SHARE, stratify=y, random_state=SPLIT_SEED)
    return (x_train, y_train) if split == "train" else (x_test, y_test)
