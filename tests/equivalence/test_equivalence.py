"""The strategy does not change the result: the same trainings in real processes under every strategy, compared.

Each strategy does all cases in one start of its processes; the tests then read what the runs left behind.
"""

from __future__ import annotations

import json
import pathlib

import keras
import numpy as np
import pytest
import support
from equivalence.cases import CASES, OPTIMIZERS, model_of_optimizers
from equivalence.runs import (
    HOROVOD,
    PADDED_CASES,
    Run,
    Runs,
    assert_same_bits,
    load_weights,
    of_two_processes,
    runs_of,
)

TOLERANCE = 1e-5
HALF_PRECISION_TOLERANCE = 2e-3
HALF_PRECISION = ("overflow", "overflow_left_out", "reduced_overflow")
REDUCED_TOLERANCE = 5e-4  # of gradients that travel in 16 bits, of which one device has none
# Two replicas of one process train all cases. What is built on top of the step happens on a replica alone: others add
# nothing but time to it.
WITH_FOUR_REPLICAS = (
    *("accumulation", "fewer_examples_than_replicas", "batch_norm_masked", "whole_batch", "counts"),
    *("overflow", "overflow_left_out", "large_embedding", "masked_and_summed", "random_layers"),
    "float8",
)
OF_TWO_PROCESSES = of_two_processes(
    with_both=(
        *("sgd", "accumulation", "fewer_examples_than_replicas", "batch_norm_masked", "whole_batch", "counts"),
        *("overflow", "overflow_left_out", "large_embedding", "two_outputs", "counting_metrics", "weightless"),
        *("reduced_bfloat16", "reduced_overflow", "float64", "rolled_back", "renewed_statistics", "contrastive"),
        *("random_layers_uneven", "float8", "quantized"),
    ),
    with_either=(
        *("adam_clipped", "uneven", "batch_norm", "added_losses", "masked_and_summed", "two_optimizers"),
        *("optimizers", "sample_weights", "float8_weighted", "own_methods", "distillation", "adversarial"),
        *("reduced_rows_bfloat16", "reduced_float16", "learned_losses", "groups"),
    ),
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    def compared_with(strategy: str, case: str) -> list[Run]:
        padded = [("padded2", case)] if case in PADDED_CASES else []
        return [("one_device", case), *([("mirrored2", case)] if strategy in ("multi_worker", "horovod") else padded)]

    return runs_of(request, tmp_path_factory, compared_with)


def tolerance(case: str) -> float:
    if case in HALF_PRECISION:
        return HALF_PRECISION_TOLERANCE
    return REDUCED_TOLERANCE if case.startswith("reduced_") else TOLERANCE


STRATEGIES_AND_CASES = [
    *(("mirrored2", case) for case in CASES),
    *(("mirrored4", case) for case in WITH_FOUR_REPLICAS),
    *OF_TWO_PROCESSES,
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


@pytest.mark.parametrize(("strategy", "case"), OF_TWO_PROCESSES)
def test_two_replicas_give_the_same_bits_under_every_strategy(runs: Runs, strategy: str, case: str) -> None:
    assert_same_bits(runs.weights(strategy, case), runs.weights("mirrored2", case))


def test_every_process_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    """TensorFlow's optimizers of graphs look through tables whose order is that of addresses of memory."""
    trained = set()
    for directory in (tmp_path / "1", tmp_path / "2", tmp_path / "3"):
        support.run_module("equivalence.cases", "one_device", directory, "wide", timeout=900).check()
        trained.add(b"".join(w.tobytes() for w in load_weights(directory / "wide")))
    assert len(trained) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_training_moves_the_weights_by_far_more_than_the_tolerance(runs: Runs, case: str) -> None:
    """Else the tests above would pass on a training that does nothing."""
    losses = [p["loss"] for p in runs.points("one_device", case) if p["split"] == "train"]
    first = runs.points("one_device", case)[0]
    assert first["step"] >= 2
    if len(losses) > 1:
        assert losses[0] - losses[-1] > 100 * TOLERANCE


def test_each_of_several_optimizers_moves_its_layers(runs: Runs) -> None:
    initial = model_of_optimizers()
    trained = keras.models.load_model(runs.of("one_device", "optimizers") / "export" / "model.keras")
    for name in OPTIMIZERS:
        layer = initial.get_layer(f"by_{name}")
        assert np.abs(layer.kernel - trained.get_layer(layer.name).kernel).max() > 10 * TOLERANCE


@pytest.mark.parametrize("strategy", ["one_device", "mirrored2", "mirrored4", "multi_worker", HOROVOD])
def test_an_overflow_on_one_replica_skips_the_step_on_all(runs: Runs, strategy: str) -> None:
    skipped = [e for e in runs.events(strategy, "overflow") if e["event"] == "gradient_overflow"]
    assert [(e["details"]["steps"], e["details"]["loss_scale"]) for e in skipped] == [(1, 2.0**14)]
    assert_same_bits(runs.weights(strategy, "overflow"), runs.weights(strategy, "overflow_left_out"))


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
    names = ("seen", "size", "left", "share", "steps", "first", "largest")
    found = dict(zip(names, map(float, [w for w in runs.weights(strategy, "counts") if not w.shape]), strict=True))
    seen, last = 2 * 453, 5
    assert found.pop("largest") > 0
    assert found == {
        "seen": seen,
        "size": last,
        "left": -seen,
        "share": seen / num_replicas,
        "steps": 16,
        "first": last // num_replicas,
    }
    result = json.loads((runs.of(strategy, "counts") / "result.json").read_text())
    noted = [note for note in result["notes"] if "of counts/largest, which" in note]
    assert len(noted) == len(result["notes"]) == (num_replicas > 1)
