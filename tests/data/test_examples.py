"""The examples of each kind of data train through the command, and are evaluated alike."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from support import REPOSITORY, Finished, run_python

pytestmark = pytest.mark.slow

PREPARED_BY = {
    "digits_images": ["prepare_images.py"],
    "digits_npz": ["prepare_images.py"],
    "digits_mixture": ["prepare_images.py"],
    "digits_dataset": [],
    "digits_tfrecord": ["prepare_digits.py", "--what=tfrecord"],
    "digits_tfds": ["prepare_digits.py", "--what=tfds"],
    "wine_parquet": ["prepare_tables.py"],
    "iris_csv": ["prepare_tables.py"],
    "sentences_text": ["prepare_text.py"],
}
LEAST_ACCURACY = {"digits_images": 0.96, "digits_npz": 0.96, "digits_mixture": 0.96, "sentences_text": 0.7}
FITTED = ("wine_parquet", "sentences_text")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the configurations, in which each example's data are prepared."""
    place = tmp_path_factory.mktemp("workplace")
    for name in ("configs", "examples"):
        shutil.copytree(REPOSITORY / name, place / name)
    return place


def prepare(place: pathlib.Path, name: str) -> None:
    """Makes the data of an example, which others may have made for theirs."""
    tool, *args = PREPARED_BY[name] or [""]
    made = place / " ".join(["made by", tool, *args])
    if tool and not made.exists():
        run_python([REPOSITORY / "examples/files" / tool, *args, f"--out={place}/data"]).check()
        made.touch()


def call(place: pathlib.Path, name: str, run: str, *args: str) -> Finished:
    command = ["-m", "tfdist.main", f"--gin_file=configs/experiments/{name}.gin", f"--run_dir={place}/runs/{run}"]
    return run_python([*command, *args], cwd=place, timeout=240)


@pytest.mark.parametrize("name", PREPARED_BY)
def test_the_example_trains_and_is_evaluated_alike(workplace: pathlib.Path, name: str) -> None:
    prepare(workplace, name)
    run = workplace / "runs" / name
    short = ["--gin_param=train.epochs = 3"] if "tf" in name else []
    call(workplace, name, name, *short).check()
    result = json.loads((run / "result.json").read_text())
    assert result["eval_metrics"]["accuracy"] > LEAST_ACCURACY.get(name, 0.9)
    if "digits" in name:
        assert result["examples_seen"] == (3 if short else 12) * 1437
    if name in FITTED:
        (fitted,) = (run / "fitted").iterdir()
        kept = fitted.read_text()
        call(workplace, name, name, "--mode=evaluate").check()
        evaluated = json.loads((run / "evaluation.json").read_text())
        assert evaluated["accuracy"] == result["eval_metrics"]["accuracy"] and fitted.read_text() == kept


def test_a_corrupt_image_ends_a_run(workplace: pathlib.Path) -> None:
    prepare(workplace, "digits_images")
    (workplace / "data" / "digits_images" / "test" / "3" / "bad.png").write_bytes(b"no image")
    finished = call(workplace, "digits_images", "corrupt", "--gin_param=train.epochs = 1")
    assert finished.status == 2, finished.outputs()
    assert "3/bad.png' cannot be decoded" in finished.stderr and "Replace or remove it" in finished.stderr
    assert "Traceback" not in finished.stderr
