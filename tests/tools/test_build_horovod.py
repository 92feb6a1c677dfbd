"""`python -m tfdist.build_horovod`: what it decides, what it refuses, and that the Horovod it installed reduces."""

from __future__ import annotations

import pathlib
import sys
import tomllib

import pytest
from support import REPOSITORY, run_command

from tfdist import build_horovod
from tfdist.errors import UserError

CMAKE_LISTS = """\
# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")

# Create library
add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
"""
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


# Settings


def test_the_users_own_settings_win_over_the_defaults() -> None:
    assert build_horovod.build_variables({"PATH": "/bin"}) == build_horovod.DEFAULTS
    given = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_WITHOUT_MPI": "0"}
    assert build_horovod.build_variables(given) == build_horovod.DEFAULTS | given


# The cache's key


def test_the_key_names_horovod_tensorflow_and_python() -> None:
    key = build_horovod.cache_key(build_horovod.build_variables({}), "2.21.0")
    assert key.startswith(f"horovod0.28.1-tf2.21.0-cp{sys.version_info.major}{sys.version_info.minor}-")


def test_the_key_changes_with_what_is_built_and_with_nothing_else() -> None:
    def key(environment: dict[str, str], tensorflow: str = "2.21.0") -> str:
        return build_horovod.cache_key(build_horovod.build_variables(environment), tensorflow)

    assert key({}) == key({"PATH": "/bin"})
    different = [key({}), key({}, "2.20.0"), key({"HOROVOD_WITH_MPI": "1"}), key({"HOROVOD_GPU_OPERATIONS": "NCCL"})]
    assert len(set(different)) == len(different)


def test_a_wheel_is_found_whole_and_not_where_it_is_built(tmp_path: pathlib.Path) -> None:
    built = tmp_path / "scratch" / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    built.parent.mkdir()
    built.write_bytes(b"wheel")
    assert build_horovod.find_wheel(tmp_path) is None
    assert built.replace(tmp_path / built.name) == build_horovod.find_wheel(tmp_path)


# What is refused


def test_the_xla_kernels_and_only_they_are_left_out(tmp_path: pathlib.Path) -> None:
    cmake_lists = tmp_path / "CMakeLists.txt"
    cmake_lists.write_text(CMAKE_LISTS)
    build_horovod.remove_xla_kernels(cmake_lists)
    before, after = CMAKE_LISTS.splitlines(), cmake_lists.read_text().splitlines()
    changed = [line for line in range(len(before)) if before[line] != after[line]]
    assert changed == [2]
    assert after[2].removeprefix("# ") == before[2]


def test_an_environment_without_tensorflow_gets_one_message_and_status_2(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_horovod, "installed_tensorflow", dict)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build_horovod.main([]) == 2
    shown = capsys.readouterr().err
    assert "has no module 'tensorflow'" in shown and len(shown.splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_a_step_that_fails_is_named_after_its_last_lines(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="Building Horovod failed with status 3; its last lines are above"):
        build_horovod.run_logged("Building Horovod", ["sh", "-c", "echo no compiler; exit 3"], tmp_path / "log")
    assert capsys.readouterr().err == "no compiler\n"


def test_what_it_installs_for_run_time_is_the_extra_horovod() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as stream:
        extras = tomllib.load(stream)["project"]["optional-dependencies"]
    assert list(build_horovod.RUN_TIME_PACKAGES) == extras["horovod"]


# What was installed


@pytest.mark.horovod
@pytest.mark.slow
def test_two_processes_reduce_through_horovodrun(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "allreduce.py"
    program.write_text(ALLREDUCE)
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2"]
    finished = run_command([*horovodrun, sys.executable, program], timeout=180).check()
    results = sorted(line.split("RESULT ")[1] for line in finished.stdout.splitlines() if "RESULT " in line)
    assert results == [f"{rank} 2 [3.0, 3.0, 3.0] 30.0" for rank in (0, 1)]
