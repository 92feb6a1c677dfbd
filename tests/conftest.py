"""What every test gets: a quiet environment that is part of no cluster, no seed, no silent skip of Horovod's tests."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import pathlib
import shutil
import signal
import site
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from typing import Any

import forks
import pytest
import support
from gcs.server import GcsServer
from launch.programs import PRELUDE, Run

# Before any test module imports TensorFlow, which reads most of these once.
for name in [n for n in os.environ if n.startswith(support.CLUSTER_VARIABLES) or n in ("COLUMNS", "LINES")]:
    del os.environ[name]
os.environ.update(support.QUIET | support.THREADS)
# A shell that starts the suite in the background has it, and all that it starts, ignore what these tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
forks.trace_threads()


# What takes minutes begins first, so that no process of a parallel run is left alone with it at the end.
LONG = (
    *("equivalence/test_equivalence", "equivalence/test_owners", "crashes/test_trials", "training/test_sharding"),
    *("launch/test_recovery", "tuning/test_sweep", "keras_fit/test_behaviors", "test_run_files"),
    *("keras_fit/test_callbacks_beside_fit", "launch/test_clusters", "crashes/test_crash", "training/test_memory"),
    *("launch/test_elastic", "launch/test_launch", "storage/test_gcs_kills", "training/test_callbacks"),
    "tpu_compiler/test_compile_for",
)
# What a machine too slow for CI's limit leaves out: the others' promises matter more. Each of these takes minutes, too.
LAST = ("test_benchmarks", "tuning/test_ray", "launch/test_ray", "launch/test_pipelines", "new/test_new")
LEFT_OUT = "not begun: TFDIST_TESTS_UNTIL, in seconds since 1970, has passed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = dict(zip(LONG, range(-len(LONG), 0), strict=True)) | {name: rank for rank, name in enumerate(LAST, start=1)}
    by_file = {f"tests/{name}.py": rank for name, rank in ranks.items()}
    items.sort(key=lambda item: by_file.get(item.nodeid.partition("::")[0], 0))


def pytest_collection_finish() -> None:
    """Leaves what was imported out of all later collections of garbage, each of which would take a second."""
    gc.freeze()


class Failures:
    """Tells of each failure when it comes: a run that is cut off has no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f"\n{report.nodeid} failed:\n{report.longreprtext[-2000:]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(reporter))


def pytest_runtest_setup(item: pytest.Item) -> None:
    is_late = time.time() > float(os.environ.get("TFDIST_TESTS_UNTIL", "inf"))
    if is_late and item.get_closest_marker("slow"):
        pytest.skip(LEFT_OUT)
    if item.get_closest_marker("horovod") is None:
        return
    if os.environ.get("TFDIST_SKIP_HOROVOD") == "1":
        pytest.skip("TFDIST_SKIP_HOROVOD=1")
    if importlib.util.find_spec("horovod") is None:
        pytest.fail(
            "Horovod is not installed, and its tests are not skipped in silence. "
            "Run: python -m tfdist.build_horovod, or set TFDIST_SKIP_HOROVOD=1 to go without.",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def nothing_of_another_test() -> Iterator[None]:
    """Takes back TensorFlow's global seed, under which what is not seeded seems to be, its determinism, and errors.

    Likewise Keras's policy of types, in which a later test's models would compute.
    Fails a test that leaves another handler of a signal behind, on which a later one would fail.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    changed = {number.name: now for number, old in handlers.items() if (now := signal.signal(number, old)) != old}
    assert not changed, f"the test leaves handlers of signals behind: {changed}"
    if "tfdist.data.sources.failures" in sys.modules:
        sys.modules["tfdist.data.sources.failures"].clear_errors()
    if "tensorflow" in sys.modules:
        from tensorflow.python.framework import config

        sys.modules["tensorflow"].random.set_seed(None)
        config.disable_op_determinism()
    if keras := sys.modules.get("keras"):
        keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True, scope="module")
def nothing_of_another_module() -> Iterator[None]:
    """Lets go of files and threads: TensorFlow keeps what every tf.numpy_function refers to in its default graph."""
    yield
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].compat.v1.reset_default_graph()
        gc.collect()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A server that gs:// paths of this process and of `run_python` reach; it has the bucket "bucket"."""
    from tfdist.storage import gcs_requests

    with GcsServer("bucket") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")
        gcs_requests.forget_client()
        yield server
        gcs_requests.forget_client()


@pytest.fixture(params=["local", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A directory of this machine, and one of the bucket."""
    if request.param == "local":
        return str(tmp_path)
    request.getfixturevalue("gcs")
    return "gs://bucket/run"


@pytest.fixture
def answer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., support.Finished]]:
    """Calls `tfdist.main.main` in this process, in an empty directory, and undoes what it leaves there."""
    from tfdist import main as command

    monkeypatch.chdir(tmp_path)
    environment, path = dict(os.environ), list(sys.path)

    def call(*arguments: str) -> support.Finished:
        capfd.readouterr()
        status = command.main(arguments)
        return support.Finished(status, *capfd.readouterr())

    yield call
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel of this tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(support.REPOSITORY / name, source)
    for name in ("tfdist", "configs", "examples"):
        shutil.copytree(support.REPOSITORY / name, source / name, symlinks=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", f"--wheel-dir={out}", source], check=True, stdin=subprocess.DEVNULL)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The programs of an environment with the wheel in it; what tfdist needs is this environment's, tfdist is not."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(environment, symlinks=True)
    programs = environment / "bin"
    pip = [sys.executable, "-m", "pip", f"--python={programs / 'python'}", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True, stdin=subprocess.DEVNULL)
    (packages,) = (environment / "lib").glob("python3.*/site-packages")
    (packages / "needs.pth").write_text("\n".join(site.getsitepackages()))  # a .pth in there is not read
    return programs


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Callable[..., Run]]:
    """Starts launchers with small programs in place of tfdist.main; leaves none behind."""
    with contextlib.ExitStack() as stack:

        def start(program: str, *arguments: str, options: tuple[str, ...] = (), workers: int = 2, **how: Any) -> Run:
            (tmp_path / "program.py").write_text(PRELUDE + program)
            flags = [f"--workers={workers}", "--module=program", *options, "--", *(arguments or ("x",))]
            flags = flags if any("max_restarts" in each for each in options) else ["--max_restarts=0", *flags]
            return stack.enter_context(Run(tmp_path, *flags, **how))

        yield start
