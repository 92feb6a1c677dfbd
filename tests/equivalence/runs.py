"""The runs of equivalence/cases.py under each strategy, made by real processes when a test first asks for one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import support
from equivalence.cases import CANONICAL, CASES, SHARDED, STAGED, UNSHARDED

# The other cases have no partial batch or nothing more to show.
PADDED_CASES = (
    "accumulation",
    "two_outputs",
    "fewer_examples_than_replicas",
    "batch_norm_masked",
    "batch_norm_convolution",
    "random_layers_uneven",
)
HOROVOD = pytest.param("horovod", marks=pytest.mark.horovod)
Run = tuple[str, str]  # a strategy and a case


class Runs:
    """The runs of these cases by strategy, made all at once when the first of a strategy is asked for.

    Modules of tests that run side by side share them, so that none does what another one did.
    """

    def __init__(self, tmp_path_factory: pytest.TempPathFactory, cases: Collection[Run]) -> None:
        self._tmp_path_factory = tmp_path_factory
        self._cases = cases
        self._directories: dict[Run, pathlib.Path] = {}
        self._weights: dict[Run, list[np.ndarray]] = {}

    def of(self, strategy: str, case: str) -> pathlib.Path:
        """The run directory."""
        if (strategy, case) not in self._directories:
            possible = PADDED_CASES if strategy == "padded2" else (*CASES, *UNSHARDED, *SHARDED, *CANONICAL, *STAGED)
            names = [each for each in possible if each == case or (strategy, each) in self._cases]
            with support.shared_directory(self._tmp_path_factory, f"equivalence-{strategy}") as root:
                self._directories |= {(strategy, each): root / each for each in names}
                _train(strategy, root, [each for each in names if not (root / each / "result.json").exists()])
        directory = self._directories[strategy, case]
        assert (directory / "result.json").exists(), f"{strategy} did not finish {case}"
        return directory

    def weights(self, strategy: str, case: str) -> list[np.ndarray]:
        if (strategy, case) not in self._weights:
            self._weights[strategy, case] = load_weights(self.of(strategy, case))
        return self._weights[strategy, case]

    def points(self, strategy: str, case: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.of(strategy, case) / "metrics.jsonl").read_text().splitlines()]

    def events(self, strategy: str, case: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.of(strategy, case) / "events.jsonl").read_text().splitlines()]


def _train(strategy: str, root: pathlib.Path, names: Collection[str]) -> None:
    if names:
        launch = support.LAUNCH.get(strategy)
        support.run_module("equivalence.cases", strategy, root, *names, launch=launch, timeout=900).check()


def load_weights(run_dir: pathlib.Path) -> list[np.ndarray]:
    """Of the model that a finished run has exported."""
    return keras.models.load_model(run_dir / "export" / "model.keras").get_weights()


def assert_same_bits(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    assert [np.asarray(w).tobytes() for w in ours] == [np.asarray(w).tobytes() for w in theirs]


def assert_close(ours: Iterable[Any], theirs: Iterable[Any], *, tolerance: float) -> None:
    """Weights differ by no more than the tolerance, whatever their size."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def runs_of(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    compared_with: Callable[[str, str], Iterable[Run]],
) -> Runs:
    """The runs that the tests of a module will ask for.

    Args:
      request, tmp_path_factory: pytest's.
      compared_with: by a test's strategy ("one_device" where it names none) and case, the runs that it looks at too.
    """
    cases: set[Run] = set()
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if item.module is request.module and "case" in params:  # type: ignore[attr-defined]
            strategy, case = params.get("strategy", "one_device"), params["case"]
            cases |= {(strategy, case), *compared_with(strategy, case)}
    return Runs(tmp_path_factory, cases)


def of_two_processes(with_both: Collection[str], with_either: Collection[str]) -> list[Any]:
    """Parameters (strategy, case) of the strategies that have a process for each replica.

    Args:
      with_both: cases that ask the strategy for something of their own.
      with_either: those of which some happens between replicas, in a way that others show too.
    """
    strategies = [("multi_worker", ()), ("horovod", HOROVOD.marks)]
    return [
        *(pytest.param(strategy, case, marks=marks) for case in with_both for strategy, marks in strategies),
        *(pytest.param(strategies[i % 2][0], case, marks=strategies[i % 2][1]) for i, case in enumerate(with_either)),
    ]
