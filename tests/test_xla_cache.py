"""A run that resumes finds what XLA compiled when it did so before."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest
from support import REPOSITORY, clean_environment

from tfdist.xla_cache import FLAG, FLAGS, NAME, keep_compiled


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


def test_the_cache_is_this_users_alone_and_nothing_that_others_may_have_written_is_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / NAME
    for mode, is_kept in ((0o755, True), (0o700, True), (0o777, False)):
        (cache / "x86").mkdir(parents=True, exist_ok=True)
        (cache / "x86" / "entry.pb").write_bytes(b"code")
        cache.chmod(mode)
        keep_compiled(str(tmp_path), {})
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert (cache / "x86" / "entry.pb").exists() == is_kept
    with monkeypatch.context() as patch, pytest.raises(PermissionError, match="it has to be this user's"):
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        keep_compiled(str(tmp_path), {})
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    environment: dict[str, str] = {}
    with pytest.raises(PermissionError, match="a link to one"):
        keep_compiled(str(tmp_path), environment)
    assert not environment


def train(run_dir: pathlib.Path, epochs: int) -> str:
    """Trains up to that epoch in a process that imports TensorFlow itself; returns what it wrote to stderr."""
    digits = f"--gin_file={REPOSITORY / 'configs/experiments/digits.gin'}"
    settings = ["train.xla = 'on'", f"train.epochs = {epochs}", "train.eval_data = None"]
    given = [f"--gin_param={text}" for text in settings]
    command = [sys.executable, "-m", "tfdist.main", digits, *given, f"--run_dir={run_dir}"]
    return subprocess.run(command, env=clean_environment(), check=True, capture_output=True, text=True).stderr


@pytest.mark.slow
def test_a_second_resumed_start_compiles_nothing_and_one_that_cannot_read_the_cache_removes_it(
    tmp_path: pathlib.Path,
) -> None:
    def entries() -> set[tuple[str, float]]:
        return {(path.name, path.stat().st_mtime) for path in (tmp_path / NAME).glob("*/*")}

    train(tmp_path, 1)
    assert entries()
    train(tmp_path, 2)
    resumed = entries()
    train(tmp_path, 3)
    assert entries() == resumed
    shutil.copytree(tmp_path / NAME, tmp_path / "whole")
    for epochs, is_torn in ((4, False), (5, True)):  # as a loss of power leaves blocks that were not written
        shutil.rmtree(tmp_path / NAME)
        shutil.copytree(tmp_path / "whole", tmp_path / NAME)
        for path in (tmp_path / NAME).glob("*/*.pb"):
            content = path.read_bytes()
            middle, length = len(content) // 2, len(content) // 4
            path.write_bytes(content[:middle] + (b"" if is_torn else bytes(length) + content[middle + length :]))
        said = train(tmp_path, epochs)
        assert said.count("warning: What XLA had compiled") == 1 and "Traceback" not in said
    assert "warning" not in train(tmp_path, 6)
