"""Where state and weights lie changes no result; canonical replicas and layers in stages change no bit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import support
from equivalence.cases import CANONICAL, SHARDED, STAGED
from equivalence.runs import Run, Runs, assert_close, assert_same_bits, of_two_processes, runs_of

TOLERANCE = 1e-5
SCATTERED_TOLERANCE = 1e-6  # gradients are added up in another order
# Two replicas of one process train all cases but those WITH_EITHER_KIND; each place of the state is on each strategy.
WITH_FOUR_REPLICAS = (
    *("optimizer_batch_norm", "weights_attention_clipped", "tensors_blocks"),
    *("canonical_dropout", "canonical_deep_convnet"),
)
WITH_BOTH_KINDS_OF_PROCESSES = (
    *("optimizer_adam_clipped", "optimizer_overflow", "optimizer_reduced_float16", "optimizer_large_embedding"),
    *("weights_attention_clipped", "tensors_large_embedding", "host_accumulation"),
    *("canonical_dropout", "canonical_weights", "canonical_uneven", "canonical_float8", "optimizer_float8"),
)
WITH_EITHER_KIND = (
    *("weights_attention_averaged", "tensors_groups", "optimizer_accumulation", "optimizer_batch_norm"),
    *("weights_attention_bfloat16", "tensors_attention_clipped", "optimizer_optimizer_lamb", "optimizer_ema"),
    *("canonical_convolution", "canonical_deep_convnet", "canonical_uneven_xla", "canonical_uneven_batch_norm"),
)
WITH_ODD_REPLICAS = [
    *(("mirrored3", case) for case in ("canonical_uneven", "canonical_uneven_batch_norm", "canonical_uneven_xla")),
    *(("mirrored5", case) for case in ("canonical_uneven", "canonical_microbatches")),
    *(("mirrored6", case) for case in ("canonical_uneven_batch_norm", "canonical_uneven_xla")),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    def compared_with(strategy: str, case: str) -> list[Run]:
        if case in STAGED or (case in CANONICAL and strategy != "one_device"):
            return [("one_device", case)]
        return [unsharded(strategy, case)]

    return runs_of(request, tmp_path_factory, compared_with)


def unsharded(strategy: str, case: str) -> Run:
    """The run with all of the state on every replica. Two replicas give the same bits wherever they are."""
    return "mirrored2" if strategy in support.LAUNCH else strategy, case.partition("_")[2]


def _with_strategies(cases: Collection[str]) -> list[Any]:
    return [
        *(("one_device", case) for case in cases if case.startswith("host_")),
        *(("mirrored2", case) for case in cases if case not in WITH_EITHER_KIND),
        *(("mirrored4", case) for case in cases if case in WITH_FOUR_REPLICAS),
        *of_two_processes(
            *([case for case in names if case in cases] for names in (WITH_BOTH_KINDS_OF_PROCESSES, WITH_EITHER_KIND))
        ),
    ]


@pytest.mark.parametrize(("strategy", "case"), _with_strategies(SHARDED))
def test_where_the_optimizers_state_is_changes_nothing(runs: Runs, strategy: str, case: str) -> None:
    ours, theirs = runs.weights(strategy, case), runs.weights(*unsharded(strategy, case))
    if case.startswith(("optimizer_", "host_")):
        assert_same_bits(ours, theirs)
    else:  # blocks have batch normalization
        assert_close(ours, theirs, tolerance=TOLERANCE if case.endswith("_blocks") else SCATTERED_TOLERANCE)


@pytest.mark.parametrize(("strategy", "case"), [*_with_strategies(CANONICAL), *WITH_ODD_REPLICAS])
def test_canonical_replicas_give_one_devices_bits(runs: Runs, strategy: str, case: str) -> None:
    assert_same_bits(runs.weights(strategy, case), runs.weights("one_device", case))
    losses = [[p["loss"] for p in runs.points(each, case)] for each in (strategy, "one_device")]
    assert losses[0] == losses[1] and losses[0][0] - losses[0][-1] > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["canonical_deep_convnet"])
def test_canonical_replicas_normalize_by_the_statistics_of_whole_batches(runs: Runs, case: str) -> None:
    plain = case.removeprefix("canonical_")
    assert_close(runs.weights("one_device", case), runs.weights("one_device", plain), tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "case"),
    [*(("pipelined2", case) for case in STAGED), ("pipelined3", "staged_adam"), ("pipelined3", "staged_ema")],
)
def test_stages_change_no_bit(runs: Runs, strategy: str, case: str) -> None:
    assert_same_bits(runs.weights(strategy, case), runs.weights("one_device", case))
