"""One experiment for all tests of sweeps."""

from __future__ import annotations

import pathlib

import pytest
from tuning.sweeps import write_experiment


@pytest.fixture(scope="session")
def gin_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The experiment."""
    return write_experiment(tmp_path_factory.mktemp("experiment"))
