"""The examples on image folders, array files, mixtures and one's own datasets train through the command."""

from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest
from support import REPOSITORY, Finished, run_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the configurations, and the data that they read."""
    place = tmp_path_factory.mktemp("workplace")
    run_python([REPOSITORY / "tools/prepare_images.py", f"--out={place}/data"]).check()
    for name in ("configs", "examples"):
        shutil.copytree(REPOSITORY / name, place / name)
    return place


def train(place: pathlib.Path, name: str, run: str, *params: str) -> Finished:
    command = ["-m", "tfdist.main", f"--gin_file=configs/experiments/{name}.gin", f"--run_dir={place}/runs/{run}"]
    return run_python([*command, *(f"--gin_param={param}" for param in params)], cwd=place, timeout=240)


@pytest.mark.parametrize("name", ["digits_images", "digits_npz", "digits_mixture", "digits_dataset"])
def test_the_example_learns_to_read_digits(workplace: pathlib.Path, name: str) -> None:
    train(workplace, name, name).check()
    result = json.loads((workplace / "runs" / name / "result.json").read_text())
    assert result["steps"] == 276 and result["examples_seen"] == 12 * 1437
    assert result["eval_metrics"]["accuracy"] > 0.96


def test_augmented_training_is_the_same_on_two_replicas(workplace: pathlib.Path) -> None:
    short = ("train.epochs = 2", "train.steps_per_call = 10")
    train(workplace, "digits_images", "alone", *short).check()
    mirrored = ("from tfdist.strategies import mirrored", "STRATEGY = @mirrored.Mirrored()")
    train(workplace, "digits_images", "two", *short, *mirrored, "mirrored.Mirrored.num_cpu_devices = 2").check()
    losses = []
    for run in ("alone", "two"):
        result = json.loads((workplace / "runs" / run / "result.json").read_text())
        losses.append([result["train_metrics"]["loss"], result["eval_metrics"]["loss"]])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_a_corrupt_image_ends_the_run_with_its_name(workplace: pathlib.Path) -> None:
    (workplace / "data" / "digits_images" / "test" / "3" / "bad.png").write_bytes(b"no image")
    finished = train(workplace, "digits_images", "corrupt", "train.epochs = 1")
    (workplace / "data" / "digits_images" / "test" / "3" / "bad.png").unlink()
    assert finished.status == 2, finished.outputs()
    assert "3/bad.png' cannot be decoded" in finished.stderr and "Replace or remove it" in finished.stderr
    assert "Traceback" not in finished.stderr
