"""Layers that lie on several devices, in stages, take the steps of one device: the same bits."""

from __future__ import annotations

import pytest
from equivalence.cases import STAGED
from equivalence.runs import Run, Runs, runs_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    def compared_with(strategy: str, case: str) -> list[Run]:
        return [("one_device", case)]

    return runs_of(request, tmp_path_factory, compared_with)


@pytest.mark.parametrize(
    ("strategy", "case"),
    [*(("pipelined2", case) for case in STAGED), ("pipelined3", "staged_adam"), ("pipelined3", "staged_ema")],
)
def test_stages_change_no_bit(runs: Runs, strategy: str, case: str) -> None:
    for ours, theirs in zip(runs.weights(strategy, case), runs.weights("one_device", case), strict=True):
        assert ours.tobytes() == theirs.tobytes()
