"""What every test gets: a quiet environment that is part of no cluster, no seed, no silent skip of Horovod's tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import support
from gcs.server import GcsServer

# Before any test module imports TensorFlow, which reads most of these once.
for name in [n for n in os.environ if n.startswith(support.CLUSTER_VARIABLES)]:
    del os.environ[name]
os.environ.update(support.QUIET | support.THREADS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("horovod") is None:
        return
    if os.environ.get("TFDIST_SKIP_HOROVOD") == "1":
        pytest.skip("TFDIST_SKIP_HOROVOD=1")
    if importlib.util.find_spec("horovod") is None:
        pytest.fail(
            "Horovod is not installed, and its tests are not skipped in silence. "
            "Run: python tools/build_horovod.py, or set TFDIST_SKIP_HOROVOD=1 to go without.",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def nothing_of_another_test() -> Iterator[None]:
    """Takes back TensorFlow's global seed, under which what is not seeded seems to be, its determinism, and readers."""
    yield
    if "tfdist.data.failures" in sys.modules:
        sys.modules["tfdist.data.failures"].forget()
    if "tensorflow" in sys.modules:
        from tensorflow.python.framework import config

        sys.modules["tensorflow"].random.set_seed(None)
        config.disable_op_determinism()


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


@pytest.fixture
def run_python() -> Callable[..., support.Finished]:
    """`support.run_python`."""
    return support.run_python


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """`support.free_ports`."""
    return support.free_ports
