"""`python -m tfdist.build_horovod`: what it decides, what it refuses, and that the Horovod it installed reduces."""

from __future__ import annotations

import pathlib
import sys
import tomllib

import pytest
from support import REPOSITORY, run_command

from tfdist import build_horovod

ALLREDUCE = """
import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()

@tf.function
def reduce(rank):
    return hvd.grouped_allreduce([rank * tf.ones([3]), 10.0 * rank], op=hvd.Sum)

vector, scalar = reduce(tf.constant(float(hvd.rank() + 1)))
print("RESULT", hvd.rank(), hvd.size(), vector.numpy().tolist(), float(scalar))
hvd.shutdown()
"""


def test_patches_replace_each_text_and_refuse_a_source_without_it(tmp_path: pathlib.Path) -> None:
    for name, replacements in build_horovod.PATCHES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n".join(replacements))
    build_horovod.patch_source(tmp_path)
    for name, replacements in build_horovod.PATCHES.items():
        assert all(new in (tmp_path / name).read_text() for new in replacements.values())
    with pytest.raises(AssertionError, match="does not contain"):
        build_horovod.patch_source(tmp_path)


def test_an_environment_without_tensorflow_gets_one_message_and_status_2(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_horovod, "installed_tensorflow", dict)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build_horovod.main([]) == 2
    shown = capsys.readouterr().err
    assert "has no module 'tensorflow'" in shown and len(shown.splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_what_it_installs_for_run_time_is_the_extra_horovod() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as stream:
        extras = tomllib.load(stream)["project"]["optional-dependencies"]
    assert list(build_horovod.RUN_TIME_PACKAGES) == extras["horovod"]


@pytest.mark.horovod
@pytest.mark.slow
def test_two_processes_reduce_through_horovodrun(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "allreduce.py"
    program.write_text(ALLREDUCE)
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2"]
    finished = run_command([*horovodrun, sys.executable, program], timeout=180).check()
    results = sorted(line.split("RESULT ")[1] for line in finished.stdout.splitlines() if "RESULT " in line)
    assert results == [f"{rank} 2 [3.0, 3.0, 3.0] 30.0" for rank in (0, 1)]
