"""What TensorFlow refuses on GPUs alone, on workers without any."""

from __future__ import annotations

import pathlib

import pytest
import support

PATHS = {"PYTHONPATH": f"{support.REPOSITORY}:{support.REPOSITORY / 'tests'}"}
EXPERIMENTS = {
    "digits": ["train.precision = 'float16'", "train.steps_per_call = 3"],
    "digits_contrastive": [],  # gathers rows
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_all_reduce_is_of_int32(experiment: str, tmp_path: pathlib.Path) -> None:
    params = ["train.epochs = 2", *EXPERIMENTS[experiment]]
    support.run_python(
        [
            *["-m", "tfdist.launch", "--workers=2", "--module=strategies.as_on_gpus", "--"],
            *[f"--gin_file=tfdist:experiments/{experiment}.gin", f"--run_dir={tmp_path}"],
            *[f"--gin_param={text}" for text in params],
        ],
        env=PATHS,
    ).check()
    assert (tmp_path / "export" / "model.keras").exists()
