"""Builds Horovod for the TensorFlow of this environment and installs it.

Horovod's last release does not install on TensorFlow 2.16 and later: its XLA kernels include a header that the
TensorFlow wheel no longer ships. This command takes that release's source from the package index, checks it,
leaves the XLA kernels out (one line of CMake) and builds the rest, which works. The wheel is kept in a user cache,
so that a second environment on the same machine gets it in seconds, and an environment that has it is left alone.

    python tools/build_horovod.py                            # CPU, Gloo
    HOROVOD_GPU_OPERATIONS=NCCL python tools/build_horovod.py
    HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_MPI=0 python tools/build_horovod.py

Every HOROVOD_* variable that is set reaches the build and wins over the default here: HOROVOD_CUDA_HOME,
HOROVOD_NCCL_HOME and HOROVOD_NCCL_LINK say where CUDA and NCCL are, HOROVOD_CMAKE names another CMake. Needs a C++
compiler and make; CMake and the Python build tools are brought along and touch nothing outside a temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping

HOROVOD_VERSION = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_TOOLS = ("cmake>=3.18,<4", "setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
RUN_TIME_PACKAGES = ("cloudpickle>=3,<4", "psutil>=5.9,<8", "pyyaml>=6,<7", "packaging>=24")  # the extra `horovod`
TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly")
XLA_SOURCE_LINE = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
DEFAULT_SETTINGS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
}


class BuildError(Exception):
    """Something that the user can mend; the message says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", action="store_true", help="build the wheel and print its path, install nothing")
    parser.add_argument("--rebuild", action="store_true", help="build and install even where a wheel is cached")
    parser.add_argument(
        "--cache", type=pathlib.Path, default=default_cache(), help="where wheels are kept (%(default)s)"
    )
    arguments = parser.parse_args()
    try:
        return build_and_install(arguments.cache, install=not arguments.no_install, rebuild=arguments.rebuild)
    except BuildError as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return 2


def build_and_install(cache: pathlib.Path, *, install: bool, rebuild: bool) -> int:
    settings = build_settings(os.environ)
    key = cache_key(settings, tensorflow_version())
    if install and not rebuild and installed_key() == key:
        print(f"Horovod {HOROVOD_VERSION} is installed already ({key}).")
        return 0
    check_pip()
    wheel_dir = cache / key
    with lock(cache, key):
        wheel = None if rebuild else find_wheel(wheel_dir)
        if wheel is None:
            print(f"Building Horovod {HOROVOD_VERSION} into {wheel_dir} (about five minutes on two cores)", flush=True)
            with tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as scratch:
                wheel = keep(build_wheel(pathlib.Path(scratch), settings), wheel_dir)
        if install and (rebuild or installed_key() != key):  # another process may have installed it meanwhile
            install_wheel(wheel)
    print(wheel)
    return 0


def default_cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tfdist" / "horovod"


# What to build


def build_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The HOROVOD_* variables of the build: the defaults, overridden by the user's own."""
    return DEFAULT_SETTINGS | {name: value for name, value in environment.items() if name.startswith("HOROVOD_")}


def tensorflow_version() -> str:
    for package in TENSORFLOW_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    raise BuildError(
        f"TensorFlow is not installed in this environment ({sys.prefix}); Horovod is built against it. "
        f"Run first: {sys.executable} -m pip install -e ."
    )


def cache_key(settings: Mapping[str, str], tensorflow: str) -> str:
    """Names what the binary depends on: Horovod, TensorFlow, Python, the platform and the build's settings."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    digest = hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:8]
    return f"horovod{HOROVOD_VERSION}-tf{tensorflow}-{python}-{platform.system().lower()}_{platform.machine()}-{digest}"


def installed_key() -> str | None:
    """The cache key of the wheel that Horovod was installed from; None for none or one from elsewhere."""
    try:
        origin = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return pathlib.PurePosixPath(json.loads(origin)["url"]).parent.name if origin else None


# What must be there


def check_pip() -> None:
    if importlib.util.find_spec("pip") is None:
        raise BuildError(f"This environment ({sys.prefix}) has no pip. Run: {sys.executable} -m ensurepip")


# The build


@contextlib.contextmanager
def lock(cache: pathlib.Path, key: str) -> Iterator[None]:
    """One build or installation of a wheel at a time on this machine; whoever waited finds it done."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        stream = (cache / f"{key}.lock").open("w")
    except OSError as error:
        raise BuildError(
            f"Cannot write to the cache folder {cache}: {error}. Give another one with --cache."
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def find_wheel(folder: pathlib.Path) -> pathlib.Path | None:
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def keep(wheel: pathlib.Path, wheel_dir: pathlib.Path) -> pathlib.Path:
    """Copies the wheel into the cache, where it appears whole or not at all."""
    wheel_dir.mkdir(parents=True, exist_ok=True)
    part = wheel_dir / f"{wheel.name}.part"
    shutil.copyfile(wheel, part)
    return part.replace(wheel_dir / wheel.name)


def build_wheel(scratch: pathlib.Path, settings: Mapping[str, str]) -> pathlib.Path:
    """Fetches, checks, patches and builds, all inside `scratch`."""
    tools = scratch / "tools"
    pip(
        "install", "--target", str(tools), *BUILD_TOOLS, log=scratch / "tools.log", purpose="Installing the build tools"
    )
    environment = os.environ | settings
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")]))
    environment["PATH"] = os.pathsep.join(filter(None, [str(tools / "bin"), os.environ.get("PATH")]))
    environment.setdefault("MAKEFLAGS", f"-j{os.cpu_count() or 1}")
    source = unpack(fetch_source(scratch, environment), scratch / "source")
    leave_out_xla(source / "horovod" / "tensorflow" / "CMakeLists.txt")
    built = scratch / "wheel"
    pip(
        *("wheel", "--no-build-isolation", "--no-deps", "-w", str(built), str(source)),
        env=environment,
        log=scratch / "build.log",
        purpose="Building Horovod",
    )
    wheel = find_wheel(built)
    if wheel is None:
        raise BuildError(f"The build ended without a wheel in {built}.")
    return wheel


def fetch_source(scratch: pathlib.Path, environment: Mapping[str, str]) -> pathlib.Path:
    """Downloads the pinned source release; pip checks its SHA-256 before it runs any of it."""
    requirements = scratch / "source.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SOURCE_SHA256}\n")
    pip(
        *("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "--require-hashes"),
        *("-d", str(scratch), "-r", str(requirements)),
        env=environment,
        log=scratch / "download.log",
        purpose=f"Downloading Horovod {HOROVOD_VERSION}",
    )
    return scratch / f"horovod-{HOROVOD_VERSION}.tar.gz"


def unpack(archive: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target / f"horovod-{HOROVOD_VERSION}"


def leave_out_xla(cmake_lists: pathlib.Path) -> None:
    text = cmake_lists.read_text()
    if XLA_SOURCE_LINE not in text:
        raise BuildError(f"{cmake_lists} does not hold the line expected: {XLA_SOURCE_LINE}")
    cmake_lists.write_text(
        text.replace(XLA_SOURCE_LINE, "# xla_mpi_ops.cc needs a header that TensorFlow's wheel lacks")
    )


# The installation


def install_wheel(wheel: pathlib.Path) -> None:
    """Installs the wheel and tries it; one that does not load is taken out again."""
    with tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as scratch:
        log = pathlib.Path(scratch) / "install.log"
        pip("install", *RUN_TIME_PACKAGES, log=log, purpose="Installing what Horovod needs at run time")
        pip("install", "--no-deps", "--force-reinstall", str(wheel), log=log, purpose="Installing Horovod")
        trial = [sys.executable, "-c", "import horovod.tensorflow as hvd; hvd.init(); hvd.shutdown()"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        try:
            run(trial, env=environment, log=log, purpose="Loading Horovod")
        except BuildError as error:
            pip("uninstall", "--yes", "horovod", log=log, purpose="Taking Horovod out")
            raise BuildError(f"{error} It was taken out again; --rebuild builds the wheel anew.") from error


def pip(*arguments: str, log: pathlib.Path, purpose: str, env: Mapping[str, str] | None = None) -> None:
    run([sys.executable, "-m", "pip", "--no-input", *arguments], log=log, purpose=purpose, env=env)


def run(command: list[str], *, log: pathlib.Path, purpose: str, env: Mapping[str, str] | None = None) -> None:
    """Runs a command with its output in `log`; if it fails, prints the log's errors and end."""
    with log.open("w") as stream:
        status = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        ).returncode
    if status:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-40] if "error" in line.lower()][:20]
        print("\n".join([*errors, *lines[-40:]]), file=sys.stderr)
        raise BuildError(f"{purpose} failed with status {status}; its last lines are above.")


if __name__ == "__main__":
    sys.exit(main())
