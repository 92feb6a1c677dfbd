"""One child process under MirroredStrategy for all the tests of this folder that need one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import support
from training.trainings import Trained, run


@pytest.fixture(scope="session")
def _mirrored_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with support.shared_directory(tmp_path_factory, "mirrored") as directory:
        results = directory / "results.json"
        if not results.exists():
            support.run_module("training.under_mirrored", directory).check()
        return json.loads(results.read_text())


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The training of test_resume.py that nothing interrupts."""
    from training.test_resume import BASE, memories

    return run(tmp_path_factory.mktemp("undisturbed"), callbacks=memories(), **BASE)


@pytest.fixture
def mirrored(_mirrored_results: dict[str, Any]) -> Callable[[str], Any]:
    """What a function of `under_mirrored` returned, under MirroredStrategy with two replicas."""

    def result(name: str) -> Any:
        held = _mirrored_results[name]
        if "error" in held:
            pytest.fail(held["error"], pytrace=False)
        return held["value"]

    return result
