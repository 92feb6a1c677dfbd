"""Tables: how rows are encoded, in every split alike, and one message for whatever is wrong."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

from tfdist.data.formats.input_files import file_version
from tfdist.data.sources.columns import Columns
from tfdist.data.sources.source import Order
from tfdist.data.tables.table_encoding import Encoder, FittedColumns, Rule, encode, raw_values
from tfdist.data.tables.table_files import BOOLEAN, FLOAT, INTEGER, STRING, read_table
from tfdist.data.tables.tables import Table
from tfdist.errors import UserError

NUMBERED = Columns(inputs=["number", "half"], targets="odd")
MIXED = Columns(inputs=["size", "color", "grade"], targets="label")


def write(path: pathlib.Path, columns: dict[str, Any]) -> str:
    """A table; an empty CSV file has not even a first row."""
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=8)
    elif table.num_rows:
        csv.write_csv(table, path)
    else:
        path.touch()
    return str(path)


def write_numbered(path: pathlib.Path, size: int) -> str:
    numbers = np.arange(size)
    return write(path, {"number": numbers, "half": numbers / 2, "odd": numbers % 2})


def mixed(path: pathlib.Path, **changes: Any) -> str:
    columns = {
        "size": pyarrow.array([1.0, None, 3.0, 8.0], pyarrow.float64()),
        "color": pyarrow.array(["red", "green", None, "red"]),
        "grade": pyarrow.array([7, 9, 7, None], pyarrow.int64()),
        "label": pyarrow.array(["no", "yes", "no", "yes"]),
    }
    return write(path, {name: v for name, v in (columns | changes).items() if v is not None})


def rows(source: Table) -> Any:
    """All rows in their own order."""
    read = source.reader(Order(8, None))(tf.range(source.num_examples, dtype=tf.int64), tf.constant(0, tf.int64))
    return tf.nest.map_structure(lambda t: t.numpy(), read)


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_categories_missing_values_and_standardising(tmp_path: pathlib.Path, form: str) -> None:
    files = mixed(tmp_path / f"a.{form}")
    source = Table(
        files=files, fitted_on=files, columns=MIXED, categories=["grade"], unseen="category",
        missing={"size": "mean", "color": "category", "grade": 9}, standardize=["size"],
    )  # fmt: skip
    inputs, labels = rows(source)
    np.testing.assert_allclose(inputs["size"].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(inputs["size"], np.array([-3, 0, -1, 4]) / np.sqrt(26 / 3), rtol=1e-6)
    assert inputs["color"].tolist() == [1, 0, 3, 1]  # green, red, unseen, missing
    assert inputs["grade"].tolist() == [0, 1, 0, 1]  # 7, 9
    assert labels.tolist() == [0, 1, 0, 1]
    assert {inputs["color"].dtype.name, inputs["size"].dtype.name, labels.dtype.name} == {"int32", "float32"}
    said = "\n".join(source.describe())
    assert "size: " in said and "1 missing (mean)" in said and "1 missing (category), indices 0 … 3" in said


def test_another_split_is_encoded_as_the_training_rows_are(tmp_path: pathlib.Path) -> None:
    train = mixed(tmp_path / "train.csv")
    test = mixed(
        tmp_path / "test.csv",
        size=pyarrow.array([4, 4, 4, 5]),
        color=pyarrow.array(["red", "blue", "red", "green"]),
        grade=pyarrow.array([9, 9, 7, 1]),
    )
    settings = {"fitted_on": train, "columns": MIXED, "missing": "mean", "standardize": True, "categories": ["grade"]}
    with pytest.raises(UserError, match=r"test\.csv, row 2: 'color' is b?'blue'.*\['?'green', 'red'|'green', 'red'"):
        rows(Table(files=test, **settings))
    source = Table(files=test, unseen="category", **settings)
    assert source.structure == Table(files=train, unseen="category", **settings).structure
    inputs, _ = rows(source)
    assert inputs["color"].tolist() == [1, 2, 1, 0]
    assert inputs["grade"].tolist() == [1, 1, 0, 2]
    np.testing.assert_allclose(inputs["size"], np.array([0, 0, 0, 1]) / np.sqrt(26 / 3), rtol=1e-6)


def test_a_path_that_is_there_is_no_pattern(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "br[1].csv"
    path.write_text("x,y\n1,2\n")
    assert Table(files=path, columns=Columns("x", "y")).num_examples == 1


def test_files_of_one_pattern_may_store_texts_in_different_ways(tmp_path: pathlib.Path) -> None:
    colors = pyarrow.array(["red", None, "green"])
    for i, kind in enumerate([colors.type, pyarrow.dictionary("int8", "string"), pyarrow.string_view()]):
        write(tmp_path / f"part-{i}.parquet", {"color": colors.cast(kind), "n": [1, 2, 3]})
    files = str(tmp_path / "part-*.parquet")
    x, _ = rows(Table(files=files, fitted_on=files, columns=Columns("color", "n"), missing={"color": "red"}))
    assert x.tolist() == [1, 1, 0] * 3


def test_what_was_fitted_is_kept_with_the_run(tmp_path: pathlib.Path) -> None:
    train, run = mixed(tmp_path / "train.parquet"), str(tmp_path / "run" / "fitted")
    settings = {"fitted_on": train, "columns": MIXED, "missing": {"size": "mean", "color": "category", "grade": 0}}
    first = Table(files=train, **settings)
    first.prepare(run)
    (kept,) = pathlib.Path(run).glob("*.json")
    assert json.loads(kept.read_text())["vocabularies"] == {"color": ["green", "red"], "label": ["no", "yes"]}
    mixed(tmp_path / "train.parquet", color=pyarrow.array(["a", "b", "c", "red"]))  # the data changes under the run
    again = Table(files=train, unseen="category", **settings)
    assert again.fitted.vocabularies["color"] == ["a", "b", "c", "red"]
    again = Table(files=train, **settings)
    again.prepare(run)
    assert again.fitted == first.fitted


def test_inputs_are_stacked_in_the_order_of_their_names(tmp_path: pathlib.Path) -> None:
    files = write_numbered(tmp_path / "a.csv", 5)
    source = Table(files=files, columns=Columns(["half", "number"], "odd", weights="half"), stack_inputs=True)
    x, y, weights = rows(source)
    assert source.structure[0] == tf.TensorSpec([None, 2], tf.float32)
    assert x.tolist() == [[n / 2, n] for n in range(5)]
    assert y.dtype == np.int64
    assert weights.dtype == np.float32


def test_csv_rows_may_hold_line_ends_empty_lines_and_other_signs(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes('\ufeffname\tn\r\n"a\nb"\t1\r\n\r\n"say ""x"""\t2\r\nü\t3'.encode())
    found = read_table(file_version(str(path))).to_pydict()
    assert found == {"name": ["a\nb", 'say "x"', "ü"], "n": [1, 2, 3]}


@pytest.mark.parametrize("cells", [['5" pipe'], ['5" pipe', '6" pipe'], ['5" x 6" pipe', 'a"'], ["é", 'b"']])
def test_a_quote_within_a_cell_of_csv_is_text(tmp_path: pathlib.Path, cells: list[str]) -> None:
    path = text(tmp_path / "a.csv", 'name,y\n"say ""5""",0\n' + "".join(f"{cell},1\n" for cell in cells))
    assert read_table(file_version(path))["name"].to_pylist() == ['say "5"', *cells]


def text(path: pathlib.Path, content: str) -> str:
    path.write_text(content)
    return str(path)


def table(files: Any, columns: Columns = NUMBERED, **settings: Any) -> Callable[[], Any]:
    return lambda: rows(Table(files=files, columns=columns, **settings))


def test_what_is_wrong_with_rows_gets_a_message(tmp_path: pathlib.Path) -> None:
    files = mixed(tmp_path / "a.csv")
    place = r"a\.csv, row 2: "
    for make, message in (
        (table(files, MIXED), "Write the training files in every split, for training itself tfdist.Table.fitted_on = "),
        (table(files, MIXED, fitted_on=files), place + "'size' is missing. Write tfdist.Table.missing"),
        (table(files, MIXED, fitted_on=files, missing="mean"), "'color' is missing.*'category'"),
        (table(files, Columns("size", "lable")), r"has no column 'lable'; .*Did you mean 'label'"),
        (table(files, MIXED, missing={"collor": 1}), "Table.missing names 'collor'.*Did you mean 'color'"),
        (table(files, MIXED, missing={"color": "mean"}), "Table.missing is 'mean' for 'color'"),
        (table(files, MIXED, missing={"size": "category"}), "Table.missing is 'category' for 'size'"),
        (table(files, MIXED, fitted_on=files, stack_inputs=True), r"the inputs \['color'\] hold categories"),
        (table(files, MIXED, categories="grade"), "Table.categories is 'grade'; write the names of columns in a list"),
        (table(files, MIXED, unseen="drop"), "Table.unseen is 'drop'"),
        (table(files, MIXED, vocabularies={"color": [1]}), "Table.vocabularies gives .1. for 'color'"),
        (table(files, MIXED, standardize=["color"]), "Table.standardize names 'color'"),
        (table(files, MIXED, delimiter=";;"), "Table.delimiter is one ASCII character"),
        (table(files, MIXED, delimiter=5), "Table.delimiter is one ASCII character, .* received 5"),
    ):
        with pytest.raises(UserError, match=f"(?s){message}"):
            make()


def test_what_is_wrong_with_files_gets_a_message(tmp_path: pathlib.Path) -> None:
    head = "number,half,odd\n"
    ragged = text(tmp_path / "ragged.csv", head + "1,2,3\n\n4,5\n")
    no_rows = text(tmp_path / "norows.csv", head)
    torn = pathlib.Path(write_numbered(tmp_path / "part-0.parquet", 20))
    torn.write_bytes(torn.read_bytes()[:-20])
    text(tmp_path / "kinds-0.csv", head + "1,2,3\n")
    text(tmp_path / "kinds-1.csv", head + "1,two,3\n")
    dates = write(tmp_path / "dates.parquet", {"number": [1], "half": [np.datetime64("2020-01-01", "s")], "odd": [1]})
    huge = write(tmp_path / "huge.parquet", {"number": np.uint64([1 << 63]), "half": [1], "odd": [1]})
    for make, message in (
        (table(ragged), r"ragged\.csv: .*Row #\d: Expected 3 columns, got 2"),
        (table(text(tmp_path / "quote.csv", head + '1,2,3\n4,"5,6\n')), r"quote\.csv: a quote is not closed"),
        (
            table(text(tmp_path / "twice.csv", "a,b,a\n1,2,3\n")),
            r"received \['a', 'b', 'a'\], with \['a'\] empty or rep",
        ),
        (table(no_rows), "has no rows, in 1 files"),
        (
            table(str(tmp_path / "kinds-*.csv")),
            r"'half' holds strings in .*kinds-1\.csv, but whole numbers in .*-0\.csv",
        ),
        (table(str(tmp_path / "nothing-*.csv")), "No file matches '.*nothing"),
        (table([]), "Table.files is .., *write|Table.files is ..; write a path"),
        (table(str(torn)), r"part-0\.parquet is no readable Parquet file"),
        (table(text(tmp_path / "a.json", "{}")), r"a\.json is no table that can be read"),
        (table(dates), "'half' is of the type timestamp.*cannot hold"),
        (table(huge), "'number' holds whole numbers that int64 cannot: .*Write them as strings"),
    ):
        with pytest.raises(UserError, match=f"(?s){message}"):
            make()


# As an export encodes

FITTED = FittedColumns({"c": ["blue", "red"], "n": [3, 7]}, {"x": 2.0, "y": -1.0, "n": 1.5}, {"x": 0.5, "y": 3.0})
CATEGORY: dict[str, Any] = {"name": "c", "kind": STRING, "is_category": True}
NUMBER: dict[str, Any] = {"name": "x", "kind": FLOAT}


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (Rule(**CATEGORY), ["red", "blue", "red"], [1, 0, 1]),
        (Rule(**CATEGORY, unseen="category", missing="category"), ["red", None, "green", "blue"], [1, 3, 2, 0]),
        (Rule(**CATEGORY, unseen="category", missing="blue"), ["green", None, "blue"], [2, 0, 0]),
        (Rule(**CATEGORY, missing="category"), [None, "blue"], [2, 0]),
        (Rule(**CATEGORY, vocabulary=("", "red")), ["red", ""], [1, 0]),
        (Rule("n", INTEGER, missing=5), [4, None, -7], [4, 5, -7]),
        (Rule("n", INTEGER, missing="mean"), [4, None], [4.0, 1.5]),
        (Rule("n", INTEGER, is_category=True, missing="category"), [7, None, 3], [1, 2, 0]),
        (Rule("b", BOOLEAN, is_category=True, vocabulary=(True, False), missing="category"), [True, None], [0, 2]),
        (Rule("n", INTEGER, is_category=True, unseen="category"), [7, 3, 9], [1, 0, 2]),
        (Rule(**NUMBER), [1.5, 2.5], [1.5, 2.5]),
        (Rule(**NUMBER, missing="mean", is_standardized=True), [1.5, None, -4.0], [-1.0, 0.0, -12.0]),
        (Rule(**NUMBER, missing=9.0), [None, 0.25], [9.0, 0.25]),
        (Rule("y", INTEGER, is_float=True, is_standardized=True), [4, -7], [np.float32(5 / 3), -2.0]),
        (Rule("n", INTEGER), [4, -7], [4, -7]),
    ],
)
def test_values_are_encoded_as_in_training(rule: Rule, values: list[Any], expected: list[Any]) -> None:
    column = pyarrow.chunked_array([values])
    trained = encode(rule, column, FITTED, str)
    exported = Encoder(rule, FITTED)(tf.constant(raw_values(rule, column))).numpy()
    assert trained.tolist() == exported.tolist() == expected and trained.dtype == exported.dtype


@pytest.mark.parametrize(
    ("rule", "values", "words"),
    [
        (Rule(**CATEGORY), ["green"], "'c' is missing, or has a value"),
        (Rule(**CATEGORY, unseen="category"), [None], "'c' is missing, or has a value"),
        (Rule(**NUMBER), [None], "'x' is missing"),
    ],
)
def test_what_training_refuses_is_refused(rule: Rule, values: list[Any], words: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        Encoder(rule, FITTED)(tf.constant(raw_values(rule, pyarrow.chunked_array([values]))))
