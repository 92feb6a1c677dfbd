"""python -m tfdist.build_horovod

Builds Horovod for the TensorFlow of this environment and installs it, in about five minutes on two cores. It needs a
C++ compiler, make and pip. The wheel stays in ~/.cache/tfdist/horovod, for other environments.

Each HOROVOD_* variable reaches the build and wins over the defaults (CPU, Gloo):

  HOROVOD_GPU_OPERATIONS=NCCL python -m tfdist.build_horovod
  HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_MPI=0 python -m tfdist.build_horovod

HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME and HOROVOD_NCCL_LINK say where CUDA and NCCL are, HOROVOD_CMAKE names a CMake.

Horovod's last release does not build on TensorFlow 2.16 and later: its XLA kernels include a header that TensorFlow's
wheel lacks. The build leaves them out, and has Horovod's threads wait without taking time from those that compute. A
wheel that does not load is uninstalled, and removed from the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence

from tfdist.command_line import exit_status_of, flags, parse, start
from tfdist.errors import UserError
from tfdist.requirements import installed_tensorflow
from tfdist.strategies.cluster.environment import cache_directory

VERSION = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_TOOLS = ("cmake>=3.18,<4", "setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
RUN_TIME_PACKAGES = ("cloudpickle>=3,<4", "psutil>=5.9,<8", "pyyaml>=6,<7", "packaging>=24")  # the extra `horovod`
XLA_SOURCE_LINE = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
SKIPPED_EVENTS = """if (!lock) {
    return;"""
ADDED_TO_QUEUE = """  return Status::OK();
}
"""
WAIT_FOR_TENSORS = """
  void WaitForTensors(std::chrono::steady_clock::duration most) {
    std::unique_lock<std::mutex> lock(mutex_);
    added_.wait_for(lock, most, [this] { return !message_queue_.empty(); });
  }

protected:
  std::condition_variable added_;
"""
PATCHES = {  # replacements by file of Horovod's source
    "horovod/tensorflow/CMakeLists.txt": {XLA_SOURCE_LINE: f"# {XLA_SOURCE_LINE}"},
    # Gloo's thread comes back at once while another thread holds a lock, which on the same core cannot go on.
    "third_party/gloo/gloo/transport/tcp/pair.cc": {
        SKIPPED_EVENTS: SKIPPED_EVENTS.replace("return;", "std::this_thread::yield(); return;")
    },
    # Horovod's thread begins when it is given tensors. It asks the others every millisecond otherwise, which takes
    # part of a core that computes, and waits for the next millisecond when there is something to reduce.
    "horovod/common/operations.cc": {
        "std::this_thread::sleep_for(sleep_duration)": (
            "state.process_set_table.Get(0).tensor_queue.WaitForTensors(sleep_duration)"
        ),
        "SetCycleTimeMs(1)": "SetCycleTimeMs(10)",
    },
    "horovod/common/tensor_queue.h": {
        "#include <mutex>": "#include <chrono>\n#include <condition_variable>\n#include <mutex>",
        "\nprotected:\n": WAIT_FOR_TENSORS,
    },
    "horovod/common/tensor_queue.cc": {ADDED_TO_QUEUE: f"  added_.notify_one();\n{ADDED_TO_QUEUE}"},
}
DEFAULTS = dict.fromkeys(("HOROVOD_WITH_TENSORFLOW", "HOROVOD_WITH_GLOO"), "1") | dict.fromkeys(
    ("HOROVOD_WITHOUT_PYTORCH", "HOROVOD_WITHOUT_MXNET", "HOROVOD_WITHOUT_MPI"), "1"
)
WHEELS = "horovod-*.whl"
PIP = (sys.executable, "-m", "pip", "--no-input")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: build_and_install(arguments), trusts_the_disk=False)


def build_and_install(arguments: Sequence[str]) -> None:
    """Installs the cached wheel, which is built where there is none; does nothing where it is installed."""
    parse(flags.FlagValues(), arguments, about=__doc__)
    variables, tensorflow = build_variables(os.environ), list(installed_tensorflow().values())
    if not tensorflow:
        raise ModuleNotFoundError(name="tensorflow")
    key = cache_key(variables, tensorflow[0])
    folder = pathlib.Path(cache_directory()) / "horovod" / key
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as stream, tempfile.TemporaryDirectory(dir=folder) as scratch:
        fcntl.flock(stream, fcntl.LOCK_EX)  # one process builds or installs at a time
        installed = importlib.metadata.distributions(name="horovod")
        if any(f"/{key}/" in (each.read_text("direct_url.json") or "") for each in installed):
            print(f"Horovod {VERSION} is installed ({key}).")
            return
        wheel = next(folder.glob(WHEELS), None)
        if wheel is None:
            print(f"Building Horovod {VERSION} into {folder} (about five minutes on two cores)", flush=True)
            built = build_wheel(pathlib.Path(scratch), variables)
            wheel = built.replace(folder / built.name)
        install_wheel(wheel, pathlib.Path(scratch) / "install.log")
    print(wheel)


def build_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The HOROVOD_* variables of the build: the defaults, overridden by the user's own."""
    return DEFAULTS | {name: value for name, value in environment.items() if name.startswith("HOROVOD_")}


def cache_key(variables: Mapping[str, str], tensorflow: str) -> str:
    """Names what the binary depends on: Horovod and its patches, TensorFlow, Python, the platform and the variables."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    digest = hashlib.sha256(repr([sorted(variables.items()), PATCHES]).encode()).hexdigest()[:8]
    return f"horovod{VERSION}-tf{tensorflow}-{python}-{platform.system().lower()}_{platform.machine()}-{digest}"


def build_wheel(scratch: pathlib.Path, variables: Mapping[str, str]) -> pathlib.Path:
    """Downloads, patches and builds, all inside `scratch`; the build's tools are installed there, too."""
    tools, log, pinned = scratch / "tools", scratch / "build.log", scratch / "source.txt"
    run_logged("Installing the build tools", [*PIP, "install", "--target", str(tools), *BUILD_TOOLS], log)
    environment = {"MAKEFLAGS": f"-j{os.cpu_count() or 1}", **os.environ, **variables}
    for name, path in {"PYTHONPATH": tools, "PATH": tools / "bin"}.items():
        environment[name] = os.pathsep.join(filter(None, [str(path), os.environ.get(name)]))
    pinned.write_text(f"horovod=={VERSION} --hash=sha256:{SOURCE_SHA256}\n")
    download = [*PIP, "download", "--no-deps", "--no-build-isolation", "--no-binary=horovod", "--require-hashes"]
    run_logged("Downloading Horovod", [*download, f"--dest={scratch}", f"--requirement={pinned}"], log, environment)
    source = scratch / f"horovod-{VERSION}"
    with tarfile.open(f"{source}.tar.gz") as archive:
        archive.extractall(scratch, filter="data")
    patch_source(source)
    build = [*PIP, "wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={scratch}", str(source)]
    run_logged("Building Horovod", build, log, environment)
    (wheel,) = scratch.glob(WHEELS)
    return wheel


def patch_source(source: pathlib.Path) -> None:
    """Makes the replacements of `PATCHES`."""
    for name, replacements in PATCHES.items():
        text = (source / name).read_text()
        for old, new in replacements.items():
            assert old in text, f"{name} does not contain {old}"
            text = text.replace(old, new)
        (source / name).write_text(text)


def install_wheel(wheel: pathlib.Path, log: pathlib.Path) -> None:
    """Installs the wheel and loads it."""
    run_logged("Installing what Horovod needs", [*PIP, "install", *RUN_TIME_PACKAGES], log)
    run_logged("Installing Horovod", [*PIP, "install", "--no-deps", "--force-reinstall", str(wheel)], log)
    trial = [sys.executable, "-c", "import horovod.tensorflow as hvd; hvd.init(); hvd.shutdown()"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    try:
        run_logged("Loading Horovod", trial, log, environment)
    except UserError as error:
        run_logged("Uninstalling Horovod", [*PIP, "uninstall", "--yes", "horovod"], log)
        wheel.unlink()
        raise UserError(f"{error} It was uninstalled; run this again to build it again.") from error


def run_logged(purpose: str, command: list[str], log: pathlib.Path, env: Mapping[str, str] | None = None) -> None:
    """Runs a command; raises UserError where it fails, and prints the errors and the end of what it wrote."""
    with log.open("w") as stream:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-40] if "error" in line.lower()][:20]
        print("\n".join([*errors, *lines[-40:]]), file=sys.stderr)
        raise UserError(f"{purpose} failed with status {done.returncode}; its last lines are above.")


if __name__ == "__main__":
    start(main)
