"""Builds Horovod for the TensorFlow of this environment and installs it.

Horovod's last release does not install on TensorFlow 2.16 and later: its XLA kernels include a header that the
TensorFlow wheel no longer ships. This command takes that release's source from the package index, checks it,
leaves the XLA kernels out (one line of CMake) and builds the rest, which works. The wheel is kept in a user cache,
so that a second environment on the same machine gets it in seconds.

    python tools/build_horovod.py                            # CPU, Gloo
    HOROVOD_GPU_OPERATIONS=NCCL python tools/build_horovod.py
    HOROVOD_WITH_MPI=1 python tools/build_horovod.py

Every HOROVOD_* variable that is set reaches the build and wins over the default here. Needs a C++ compiler and
make; CMake and the Python build tools are brought along and touch nothing outside a temporary directory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping

HOROVOD_VERSION = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_TOOLS = ("cmake>=3.18,<4", "setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
XLA_SOURCE_LINE = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
DEFAULT_SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
}
# A setting of the user's that contradicts a default takes that default out.
OPPOSITES = {
    "HOROVOD_WITHOUT_TENSORFLOW": "HOROVOD_WITH_TENSORFLOW",
    "HOROVOD_WITH_PYTORCH": "HOROVOD_WITHOUT_PYTORCH",
    "HOROVOD_WITH_MXNET": "HOROVOD_WITHOUT_MXNET",
    "HOROVOD_WITHOUT_GLOO": "HOROVOD_WITH_GLOO",
    "HOROVOD_WITH_MPI": "HOROVOD_WITHOUT_MPI",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", action="store_true", help="build the wheel and print its path, install nothing")
    parser.add_argument("--cache", type=pathlib.Path, default=default_cache(), help="where wheels are kept (%(default)s)")
    arguments = parser.parse_args()
    settings = build_settings(os.environ)
    wheel_dir = arguments.cache / cache_key(settings)
    wheel = find_wheel(wheel_dir)
    if wheel is None:
        print(f"Building Horovod {HOROVOD_VERSION} into {wheel_dir} (about five minutes on two cores)", flush=True)
        with tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as scratch:
            wheel = build_wheel(pathlib.Path(scratch), wheel_dir, settings)
    if not arguments.no_install:
        run([sys.executable, "-m", "pip", "install", "--quiet", "cloudpickle", "psutil", "pyyaml", "packaging"])
        run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)])
        run([sys.executable, "-c", "import horovod.tensorflow as hvd; hvd.init(); hvd.shutdown()"])
    print(wheel)
    return 0


def default_cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tfdist" / "horovod"


def build_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The HOROVOD_* variables of the build: the defaults, overridden by the user's own."""
    given = {name: value for name, value in environment.items() if name.startswith("HOROVOD_")}
    dropped = {OPPOSITES[name] for name in given if name in OPPOSITES}
    return {name: value for name, value in DEFAULT_SETTINGS.items() if name not in dropped} | given


def cache_key(settings: Mapping[str, str]) -> str:
    """Names what the binary depends on: Horovod, TensorFlow, Python, the platform and the build's settings."""
    tensorflow = importlib.metadata.version("tensorflow")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]
    return f"horovod{HOROVOD_VERSION}-tf{tensorflow}-{python}-{platform.system().lower()}_{platform.machine()}-{digest}"


def find_wheel(folder: pathlib.Path) -> pathlib.Path | None:
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def build_wheel(scratch: pathlib.Path, wheel_dir: pathlib.Path, settings: Mapping[str, str]) -> pathlib.Path:
    """Builds in `scratch`; the finished wheel appears in `wheel_dir` whole or not at all."""
    tools = scratch / "tools"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), *BUILD_TOOLS])
    environment = dict(os.environ, **settings)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools), environment.get("PYTHONPATH")]))
    environment["PATH"] = os.pathsep.join([str(tools / "bin"), environment.get("PATH", "")])
    environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
    source = unpack(fetch_source(scratch, environment), scratch / "source")
    leave_out_xla(source / "horovod" / "tensorflow" / "CMakeLists.txt")
    built = scratch / "wheel"
    run(
        [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(built), str(source)],
        env=environment,
        log=scratch / "build.log",
    )
    wheel = find_wheel(built)
    if wheel is None:
        raise SystemExit(f"The build ended without a wheel in {built}.")
    wheel_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=".new-", dir=wheel_dir.parent))
    shutil.copy2(wheel, staging)
    try:
        staging.rename(wheel_dir)
    except OSError:  # another build of the same wheel was faster
        shutil.rmtree(staging)
    return wheel_dir / wheel.name


def fetch_source(scratch: pathlib.Path, environment: Mapping[str, str]) -> pathlib.Path:
    """Downloads the pinned source release with pip and checks its SHA-256."""
    run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary",
         "horovod", "-d", str(scratch), f"horovod=={HOROVOD_VERSION}"],
        env=dict(environment, HOROVOD_SKIP_COMPILE="1"),
    )  # fmt: skip
    archive = scratch / f"horovod-{HOROVOD_VERSION}.tar.gz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SOURCE_SHA256:
        raise SystemExit(f"{archive.name} has SHA-256 {found}, expected {SOURCE_SHA256}: refusing to build it.")
    return archive


def unpack(archive: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target / f"horovod-{HOROVOD_VERSION}"


def leave_out_xla(cmake_lists: pathlib.Path) -> None:
    text = cmake_lists.read_text()
    if XLA_SOURCE_LINE not in text:
        raise SystemExit(f"{cmake_lists} does not hold the line expected: {XLA_SOURCE_LINE}")
    cmake_lists.write_text(text.replace(XLA_SOURCE_LINE, "# xla_mpi_ops.cc needs a header that TensorFlow's wheel lacks"))


def run(command: list[str], *, env: Mapping[str, str] | None = None, log: pathlib.Path | None = None) -> None:
    """Runs a command; with `log` its output goes there, and its end is shown if the command fails."""
    if log is None:
        subprocess.run(command, env=env, check=True)
        return
    with log.open("w") as stream:
        status = subprocess.run(command, env=env, stdout=stream, stderr=subprocess.STDOUT).returncode
    if status:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "error" in line.lower()][:20]
        print("\n".join(["Errors:", *errors, "The end:", *lines[-40:]]), file=sys.stderr)
        raise SystemExit(f"Building Horovod failed with status {status}; its last lines are above.")


if __name__ == "__main__":
    sys.exit(main())
