"""The strategy does not change the result: the same trainings in real processes under every strategy, compared.

Each strategy does all cases in one start of its processes; the tests then read what the runs left behind.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection

import keras
import numpy as np
import pytest
import support
from equivalence.cases import CASES

TOLERANCE = 1e-5
HALF_PRECISION_TOLERANCE = 2e-3
HALF_PRECISION = ("overflow", "overflow_left_out", "sam_overflow")
HOROVOD = pytest.param("horovod", marks=pytest.mark.horovod)
OTHERS = ("mirrored2", "mirrored4", "multi_worker", HOROVOD)
# What is built on top of the step is shown with two replicas; four add nothing but time.
RECIPES = tuple(CASES)[tuple(CASES).index("optimizer_adadelta") :]
WITH_TWO_REPLICAS = ("multi_worker", HOROVOD)
# The other cases have no partial batch or nothing more to show.
PADDED_CASES = (
    *("uneven", "accumulation", "sample_weights", "two_outputs", "fewer_examples_than_replicas"),
    *("batch_norm", "batch_norm_masked", "batch_norm_convolution"),
)
LAUNCH = {
    "one_device": [],
    "mirrored2": [],
    "mirrored4": [],
    "padded2": [],
    "multi_worker": ["-m", "tfdist.launch", "--workers=2"],
    "horovod": ["-m", "tfdist.launch", "--workers=2", "--launcher=horovod"],
}

pytestmark = pytest.mark.slow


class Runs:
    """The runs of these cases by strategy, made when they are first asked for."""

    def __init__(self, root: pathlib.Path, cases: Collection[str]) -> None:
        self._root = root
        self._cases = cases
        self._done: set[tuple[str, str]] = set()

    def of(self, strategy: str, case: str) -> pathlib.Path:
        """The run directory."""
        directory = self._root / strategy
        if (strategy, case) not in self._done:
            launch = LAUNCH[strategy]
            program = [*launch, "--module=equivalence.cases", "--"] if launch else ["-m", "equivalence.cases"]
            paths = f"{support.REPOSITORY}:{support.REPOSITORY / 'tests'}"
            possible = PADDED_CASES if strategy == "padded2" else CASES
            names = [each for each in possible if each == case or each in self._cases]
            names = [each for each in names if (strategy, each) not in self._done]
            self._done.update((strategy, each) for each in names)
            support.run_python([*program, strategy, directory, *names], env={"PYTHONPATH": paths}, timeout=900).check()
        assert (directory / case / "result.json").exists(), f"{strategy} did not finish {case}"
        return directory / case

    def weights(self, strategy: str, case: str) -> list[np.ndarray]:
        return keras.models.load_model(self.of(strategy, case) / "export" / "model.keras").get_weights()

    def points(self, strategy: str, case: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.of(strategy, case) / "metrics.jsonl").read_text().splitlines()]

    def events(self, strategy: str, case: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.of(strategy, case) / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    items = [item for item in request.session.items if item.module is request.module]
    return Runs(tmp_path_factory.mktemp("equivalence"), {item.callspec.params.get("case") for item in items})


def tolerance(case: str) -> float:
    return HALF_PRECISION_TOLERANCE if case in HALF_PRECISION else TOLERANCE


STRATEGIES_AND_CASES = [
    pytest.param(*each.values, case, marks=each.marks) if isinstance(each, type(HOROVOD)) else (each, case)
    for each in OTHERS
    for case in CASES
    if each != "mirrored4" or case not in RECIPES
]


@pytest.mark.parametrize(("strategy", "case"), STRATEGIES_AND_CASES)
def test_weights_agree_with_one_device(runs: Runs, strategy: str, case: str) -> None:
    expected, found = runs.weights("one_device", case), runs.weights(strategy, case)
    assert [w.shape for w in found] == [w.shape for w in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if case != "counts" or ours.shape:  # what a replica counts depends on the replicas
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance(case))


@pytest.mark.parametrize(("strategy", "case"), STRATEGIES_AND_CASES)
def test_reported_losses_and_metrics_agree_with_one_device(runs: Runs, strategy: str, case: str) -> None:
    expected, found = runs.points("one_device", case), runs.points(strategy, case)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["split"] == theirs["split"]
        numbers = [name for name in theirs if name != "split"]
        np.testing.assert_allclose(
            [ours[n] for n in numbers], [theirs[n] for n in numbers], rtol=0, atol=tolerance(case), err_msg=str(numbers)
        )


@pytest.mark.parametrize("case", PADDED_CASES)
def test_padding_to_static_shapes_changes_nothing(runs: Runs, case: str) -> None:
    test_weights_agree_with_one_device(runs, "padded2", case)
    test_reported_losses_and_metrics_agree_with_one_device(runs, "padded2", case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", WITH_TWO_REPLICAS)
def test_two_replicas_give_the_same_bits_under_every_strategy(runs: Runs, strategy: str, case: str) -> None:
    for ours, theirs in zip(runs.weights(strategy, case), runs.weights("mirrored2", case), strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_a_training_moves_the_weights_by_far_more_than_the_tolerance(runs: Runs, case: str) -> None:
    """Else the tests above would pass on a training that does nothing."""
    losses = [p["loss"] for p in runs.points("one_device", case) if p["split"] == "train"]
    first = runs.points("one_device", case)[0]
    assert first["step"] >= 2
    if len(losses) > 1:
        assert losses[0] - losses[-1] > 100 * TOLERANCE


@pytest.mark.parametrize("strategy", ["one_device", *OTHERS])
def test_an_overflow_on_one_replica_skips_the_step_on_all(runs: Runs, strategy: str) -> None:
    skipped = [e for e in runs.events(strategy, "overflow") if e["event"] == "steps_skipped"]
    assert [(e["details"]["steps"], e["details"]["loss_scale"]) for e in skipped] == [(1, 2.0**14)]
    without = runs.weights(strategy, "overflow_left_out")
    for ours, theirs in zip(runs.weights(strategy, "overflow"), without, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("strategy", "num_replicas"),
    [
        ("one_device", 1),
        ("mirrored2", 2),
        ("mirrored4", 4),
        ("multi_worker", 2),
        pytest.param("horovod", 2, marks=pytest.mark.horovod),
    ],
)
def test_variables_that_count_follow_their_aggregation(runs: Runs, strategy: str, num_replicas: int) -> None:
    """453 examples, twice, in batches of 64: 7 whole ones and one of 5."""
    names = ("seen", "size", "left", "share", "steps", "first")
    found = dict(zip(names, map(float, [w for w in runs.weights(strategy, "counts") if not w.shape]), strict=True))
    seen, last = 2 * 453, 5
    assert found == {
        "seen": seen,
        "size": last,
        "left": -seen,
        "share": seen / num_replicas,
        "steps": 16,
        "first": last // num_replicas,
    }
