"""What every test gets: a quiet environment that is part of no cluster, and no silent skip of Horovod's tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import support

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


@pytest.fixture
def run_python() -> Callable[..., support.Finished]:
    """`support.run_python`."""
    return support.run_python


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """`support.free_ports`."""
    return support.free_ports
