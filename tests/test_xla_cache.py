"""A run that resumes finds what XLA compiled when it did so before."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from support import REPOSITORY, clean_environment

from tfdist.xla_cache import FLAG, FLAGS, keep_compiled


@pytest.mark.parametrize(
    ("run_dir", "before", "is_kept"),
    [
        ("run", "", True),
        ("run", "--tf_xla_enable_lazy_compilation=false", True),
        ("run", f"{FLAG}=/mine", False),
        ("gs://bucket/run", "", False),
        ("a run", "", False),  # TensorFlow splits its flags at spaces
    ],
)
def test_the_flag_is_set_where_it_can_be(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, run_dir: str, before: str, is_kept: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {FLAGS: before}
    keep_compiled(run_dir, environment)
    assert environment[FLAGS].startswith(before)
    assert (f"{FLAG}={tmp_path}/run/xla_cache/" in environment[FLAGS]) == is_kept


@pytest.mark.slow
def test_a_second_resumed_start_compiles_nothing(tmp_path: pathlib.Path) -> None:
    def train(epochs: int) -> set[tuple[str, float]]:
        digits = f"--gin_file={REPOSITORY / 'configs/experiments/digits.gin'}"
        settings = ["train.xla = 'on'", f"train.epochs = {epochs}", "train.eval_data = None"]
        given = [f"--gin_param={text}" for text in settings]
        command = [sys.executable, "-m", "tfdist.main", digits, *given, f"--run_dir={tmp_path / 'run'}"]
        subprocess.run(command, env=clean_environment(), check=True, capture_output=True)  # imports TensorFlow itself
        return {(path.name, path.stat().st_mtime) for path in (tmp_path / "run" / "xla_cache").glob("*/*")}

    assert train(1)
    resumed = train(2)
    assert train(3) == resumed
