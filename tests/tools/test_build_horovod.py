"""tools/build_horovod.py: what it decides, what it refuses, and that the Horovod it installed reduces."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import tomllib
from types import ModuleType

import pytest
from support import REPOSITORY, run_command, run_python

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


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = REPOSITORY / "tools" / "build_horovod.py"
    spec = importlib.util.spec_from_file_location("build_horovod", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Settings


def test_the_users_own_settings_win_over_the_defaults(tool: ModuleType) -> None:
    assert tool.build_settings({"PATH": "/bin"}) == tool.DEFAULT_SETTINGS
    given = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_WITHOUT_MPI": "0"}
    assert tool.build_settings(given) == tool.DEFAULT_SETTINGS | given


# The cache's key


def test_the_key_names_horovod_tensorflow_and_python(tool: ModuleType) -> None:
    key = tool.cache_key(tool.build_settings({}), "2.21.0")
    assert key.startswith(f"horovod0.28.1-tf2.21.0-cp{sys.version_info.major}{sys.version_info.minor}-")


def test_the_key_changes_with_what_is_built_and_with_nothing_else(tool: ModuleType) -> None:
    def key(environment: dict[str, str], tensorflow: str = "2.21.0") -> str:
        return tool.cache_key(tool.build_settings(environment), tensorflow)

    assert key({}) == key({"PATH": "/bin"})
    different = [key({}), key({}, "2.20.0"), key({"HOROVOD_WITH_MPI": "1"}), key({"HOROVOD_GPU_OPERATIONS": "NCCL"})]
    assert len(set(different)) == len(different)


def test_a_kept_wheel_is_found_and_a_part_of_one_is_not(tool: ModuleType, tmp_path: pathlib.Path) -> None:
    built = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    built.write_bytes(b"wheel")
    folder = tmp_path / "cache" / "key"
    assert tool.find_wheel(folder) is None
    kept = tool.keep(built, folder)
    assert kept == tool.find_wheel(folder)
    kept.rename(kept.with_name(f"{kept.name}.part"))
    assert tool.find_wheel(folder) is None


# What is refused


def test_the_xla_kernels_and_only_they_are_left_out(tool: ModuleType, tmp_path: pathlib.Path) -> None:
    cmake_lists = tmp_path / "CMakeLists.txt"
    cmake_lists.write_text(CMAKE_LISTS)
    tool.leave_out_xla(cmake_lists)
    before, after = CMAKE_LISTS.splitlines(), cmake_lists.read_text().splitlines()
    changed = [line for line in range(len(before)) if before[line] != after[line]]
    assert changed == [2]
    assert after[2].startswith("#")
    with pytest.raises(tool.BuildError, match="does not hold the line expected"):
        tool.leave_out_xla(cmake_lists)


def test_an_environment_without_tensorflow_gets_one_message_and_status_2(tmp_path: pathlib.Path) -> None:
    # -S hides site-packages, and with it TensorFlow.
    finished = run_python(["-S", REPOSITORY / "tools" / "build_horovod.py", "--cache", tmp_path / "cache"])
    assert finished.status == 2
    assert finished.stderr.startswith("build_horovod: TensorFlow is not installed in this environment")
    assert len(finished.stderr.splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_what_it_installs_for_run_time_is_the_extra_horovod(tool: ModuleType) -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as stream:
        extras = tomllib.load(stream)["project"]["optional-dependencies"]
    assert list(tool.RUN_TIME_PACKAGES) == extras["horovod"]


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
