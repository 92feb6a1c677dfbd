"""`tfdist new` in real processes: what it writes for each kind of data, and what it refuses."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import prepare_digits
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from sklearn.datasets import load_diabetes, load_digits, load_wine
from support import Finished, run_command, run_python

from tfdist.commands import verbs
from tfdist.new import new
from tfdist.new.description import DataRequest


def write_table(folder: Path) -> Path:
    """Wines by their measurements: numbers of which some are missing, categories, texts that differ in every row.

    Two columns have names without letters A to Z, and one holds whole numbers that float64 does not.
    """
    wines = load_wine()
    lines = ["alcohol,кислота,strength,is_dark,bottle,номер,cultivar"]
    for i, (row, cultivar) in enumerate(zip(wines.data, wines.target, strict=True)):
        strength = "" if i % 20 == 0 else "strong" if row[0] > 13 else "light"
        acid = "" if i % 15 == 0 else row[1]
        lines.append(f"{row[0]},{acid},{strength},{row[9] > 5},bottle {i},{10**18 + i},{wines.target_names[cultivar]}")
    (folder / "wines.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "wines.csv"


def write_numbers(folder: Path) -> Path:
    patients = load_diabetes()
    columns = dict(zip(patients.feature_names, patients.data.T, strict=True)) | {"target": patients.target}
    parquet.write_table(pyarrow.table(columns), folder / "patients.parquet")
    return folder / "patients.parquet"


def write_images(folder: Path) -> Path:
    from PIL import Image

    digits = load_digits()
    for i in range(120):
        place = folder / "digits" / str(digits.target[i])
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[i] * 15).astype(np.uint8)).save(place / f"{i}.png")
    return folder / "digits"


def write_text(folder: Path) -> Path:
    texts = {"wine": load_wine().DESCR, "diabetes": load_diabetes().DESCR}
    lines = [f"{label}\t{line}\n" for label, text in texts.items() for line in text.splitlines() if line.split()]
    (folder / "lines.txt").write_text("".join(lines))
    return folder / "lines.txt"


def write_arrays(folder: Path) -> Path:
    digits = load_digits()
    np.savez(folder / "digits.npz", images=digits.images, labels=digits.target)
    return folder / "digits.npz"


def write_two_arrays(folder: Path) -> Path:
    patients = load_diabetes()
    np.save(folder / "x.npy", patients.data)
    np.save(folder / "y.npy", patients.target)
    return folder / "x.npy"


def write_tfds(folder: Path) -> Path:
    """The digits as a prepared TensorFlow data set, whose name is its directory's."""
    prepare_digits.prepare_tfds(str(folder), "tfrecord", num_shards=2)
    return folder / "digits"


def train(folder: Path, *arguments: str) -> Finished:
    return run_python(["-m", "tfdist.main", "--gin_file=train.gin", "--run_dir=runs/one", *arguments], cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "target", "metric"),
    [
        (write_table, "cultivar", "accuracy"),
        (write_numbers, "target", "rmse"),
        (write_images, None, "accuracy"),
        (write_text, None, "accuracy"),
        (write_arrays, "labels", "accuracy"),
        (write_two_arrays, "y.npy", "rmse"),
        (write_tfds, None, "accuracy"),
    ],
)
def test_what_is_written_is_valid_trains_and_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path], target: str | None, metric: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = make(tmp_path)
    flags = [f"--target={target}"] if target else ["--data=tfds"] if make is write_tfds else []
    assert verbs.run(["new", "own", f"--file={file.name}", *flags]) == 0
    own = tmp_path / "own"
    validated = run_python(["-m", "tfdist.main", "--gin_file=sweep.gin", "--mode=validate"], cwd=own).check()
    assert validated.stdout.splitlines()[-1] == "valid"
    assert metric in train(own, "--gin_param=train.steps = 2").check().stdout
    if target == "labels":
        run_python(["-m", "pytest", "-q", "test_experiment.py"], cwd=own).check()
    check = ["check", "--select=E,F,I,B,UP,SIM", "--isolated", "--line-length=120", "."]
    run_command([Path(sys.executable).with_name("ruff"), *check], cwd=own).check()


@pytest.mark.slow
def test_a_search_trains_and_exports_the_best_and_shows_the_others(tmp_path: Path) -> None:
    own = tmp_path / "own"
    command = ["-m", "tfdist", "new", own, f"--file={write_table(tmp_path)}", "--target=cultivar", "--search_trials=2"]
    told = run_python(command).check().stdout
    assert "best val_loss" in told and f"all trials: {own / 'runs/sweep/report/index.html'}" in told
    assert (own / "runs/best/export/saved_model").is_dir()
    assert (own / "runs/sweep/report/index.html").is_file()


@pytest.mark.slow
def test_a_search_without_time_for_one_trial_says_how_to_go_on(tmp_path: Path) -> None:
    own = tmp_path / "own"
    told = run_python(
        ["-m", "tfdist", "new", own, f"--file={write_table(tmp_path)}", "--target=cultivar", "--search_minutes=0.001"]
    )
    assert told.status == 2
    assert "error: No trial has an objective; " in told.stderr and "Traceback" not in told.stderr
    go_on = shlex.split(told.stderr.rpartition("go on with: ")[2])[1:]
    run_python([*go_on, "--gin_param=tune.max_trials = 1"]).check()
    assert (own / "runs/sweep/best.gin").is_file()


@pytest.mark.parametrize(("last", "classes"), [("1.0", [0, 1]), ("1.5", None), ("NaN", [0, 1])])
def test_whole_numbers_that_pandas_wrote_beside_missing_ones_are_classes(
    tmp_path: Path, last: str, classes: list[int] | None
) -> None:
    rows = [f"{n},{n % 2}.0" for n in range(30)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,y", *rows, "30,", f"31,{last}"]))
    found = new.inspect_data(DataRequest("table", str(tmp_path / "rows.csv"), "y", None))
    assert found.classes == classes


@pytest.mark.parametrize("values", ["floats with NaN", "decimals"])
def test_numbers_of_any_type_are_learned(tmp_path: Path, values: str) -> None:
    numbers = pyarrow.array([*(n / 2 for n in range(40)), 0.25], pyarrow.float64())
    y = numbers.cast(pyarrow.decimal128(9, 2)) if values == "decimals" else [*numbers.to_pylist()[:-1], float("nan")]
    parquet.write_table(pyarrow.table({"x": list(range(41)), "y": y}), tmp_path / "rows.parquet")
    found = new.inspect_data(DataRequest("table", str(tmp_path / "rows.parquet"), "y", None))
    assert found.classes is None and 0 < found.values["mean"] < 20 and 0 < found.values["deviation"] < 20


@pytest.mark.parametrize("name", ['y""" + print("ran") + """', "y\\", 'y"', "y\nimport os", "y\u2028z", "y\x1b[2J"])
def test_a_name_in_the_data_ends_no_docstring_and_no_comment(tmp_path: Path, name: str) -> None:
    x, y = np.ones((40, 2), np.float32), np.arange(40) % 2
    np.savez(tmp_path / "data.npz", **{"x": x, name: y})
    assert verbs.run(["new", f"--file={tmp_path / 'data.npz'}", f"--target={name}", str(tmp_path / "own")]) == 0
    tree = ast.parse((tmp_path / "own" / "experiment.py").read_text())
    first = tree.body[0]
    assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    assert [type(each) for each in tree.body[1:3]] == [ast.Import, ast.Import]
    gin = (tmp_path / "own" / "train.gin").read_text().splitlines()
    assert gin[1].startswith("# Often changed") and "y" in gin[0]


def test_every_mistake_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").write_text("")
    (tmp_path / "model.h5").write_text("")
    (tmp_path / "plain.txt").write_text("no label\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "empty.txt").write_text("")
    for place in ("train/a", "train/b", "test/a", "test/c"):
        (tmp_path / "split" / place).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "split" / place / "0.png")
    (tmp_path / "valueless.csv").write_text("a,b\n,\n,\n")
    (tmp_path / "semicolons.csv").write_text("a;b\n1.5;2\n")
    (tmp_path / "infinite.csv").write_text("a,b\n1,2.5\n2,inf\n")
    mistakes = {
        ("own",): "--file is missing",
        ("own", "--file=wines.csv"): "--target is missing. wines.csv has alcohol",
        ("own", "--file=wines.csv", "--target=cultivars"): "Did you mean 'cultivar'?",
        ("own", "--file=wines.csv", "--target=cultivar", "--predict=number"): "Leave out --predict=number",
        ("full", "--file=wines.csv"): "not an empty directory",
        ("own", "--file=model.h5"): "is of no kind that its ending tells",
        ("own", "--file=gone.csv"): "There is no file",
        ("own", "--file=plain.txt"): "plain.txt:1 has no '\\t'",
        ("own", "--file=full"): "holds no subdirectories; images are looked for in",
        ("own", "--data=arrays", "--file=wines.csv", "--target=cultivar"): "is no .npy file, or a damaged one",
        ("own", "--file=empty.csv", "--target=b"): "no rows below the names",
        ("own", "--file=empty.txt"): "'label' has no two values, but []",
        ("own", "--file=split"): "split/test holds the class 'c'",
        ("own", "--file=valueless.csv", "--target=b"): "valueless.csv has no column with values",
        ("own", "--file=semicolons.csv", "--target=b"): "one column, 'a;b': ';' separates no columns here",
        ("own", "--file=infinite.csv", "--target=b"): "infinite.csv has infinite numbers in 'b'",
        (): "One directory is to be written",
    }
    for arguments, message in mistakes.items():
        assert verbs.run(["new", *arguments]) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("error:") == 1, told
    assert not (tmp_path / "own").exists()


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_table(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert verbs.run(["new", str(tmp_path / "own"), f"--file={file}"]) == 2
    assert "pip install 'tfdist[tables]'" in capsys.readouterr().err
