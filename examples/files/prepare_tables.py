"""Writes example tables from what ships with scikit-learn: wines in Parquet files, irises in CSV files.

    python -m tfdist.examples.files.prepare_tables [--out=data]

Makes OUT/wine/{train-0,train-1,train-2,test}.parquet and OUT/iris/{train-0,train-1,test}.csv. A few measurements of the
wines are left out, the same ones each time, so that there is something missing.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

TEST_SHARE = 0.25
SEED = 0
WINE_SHARES = (0.5, 0.3, 0.2)  # of the training rows, by file: files differ in size
IRIS_SHARES = (0.6, 0.4)
ROWS_PER_GROUP = 16
MISSING_SHARE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="data", type=pathlib.Path, help="the directory to write to")
    out = parser.parse_args().out
    for path in [*write_wine(out / "wine"), *write_iris(out / "iris")]:
        print(path)


def write_wine(folder: pathlib.Path) -> list[pathlib.Path]:
    from pyarrow import parquet
    from sklearn.datasets import load_wine

    names, values, labels = _name_columns(load_wine())
    draw = np.random.default_rng(SEED)
    values = np.where(draw.random(values.shape) < MISSING_SHARE, np.nan, values)
    return _write(
        folder, "parquet", names, values, labels, WINE_SHARES,
        target="cultivar",
        write=lambda table, path: parquet.write_table(table, path, row_group_size=ROWS_PER_GROUP),
    )  # fmt: skip


def write_iris(folder: pathlib.Path) -> list[pathlib.Path]:
    from pyarrow import csv
    from sklearn.datasets import load_iris

    names, values, labels = _name_columns(load_iris())
    return _write(folder, "csv", names, values, labels, IRIS_SHARES, target="species", write=csv.write_csv)


def _name_columns(data) -> tuple[list[str], np.ndarray, list[str]]:
    """Column names without units, float64 [n, columns], and the labels as words."""
    names = [name.removesuffix(" (cm)").replace("/", "_").replace(" ", "_") for name in data.feature_names]
    return names, data.data, [str(data.target_names[label]) for label in data.target]


def _write(folder, suffix, names, values, labels, shares, *, target, write) -> list[pathlib.Path]:
    import pyarrow
    from sklearn.model_selection import train_test_split

    columns = {name: pyarrow.array(values[:, i], from_pandas=True) for i, name in enumerate(names)}
    table = pyarrow.table({**columns, target: labels})
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_SHARE, stratify=labels, random_state=SEED)
    edges = np.round(np.cumsum([0, *shares]) * len(train)).astype(int)
    parts = {f"train-{i}": train[edges[i] : edges[i + 1]] for i in range(len(shares))} | {"test": test}
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for name in parts]
    for path, rows in zip(paths, parts.values(), strict=True):
        write(table.take(rows), str(path))
    return paths


if __name__ == "__main__":
    main()
