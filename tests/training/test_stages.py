"""Layers on several devices: where they lie, that microbatches follow each other, and what is refused.

That it changes no weight is shown in tests/equivalence.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import support
from equivalence.cases import staged_model
from equivalence.runs import assert_same_bits, load_weights
from mistakes import call, each_is_refused
from training.trainings import run

from tfdist.strategies.pipelined import Pipelined
from tfdist.training.sharding.stages import layers_by_device


def trained(directory: pathlib.Path, strategy: str, epochs: int, *model: str) -> dict[str, Any]:
    done = support.run_module("training.staged", directory, strategy, str(epochs), *model).check()
    found = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return json.loads(found[0].removeprefix("found ")) if found else {}


@pytest.mark.slow
def test_a_microbatch_is_at_one_stage_while_the_next_one_is_at_another(tmp_path: pathlib.Path) -> None:
    assert trained(tmp_path, "pipelined2", 2, "meeting")["met"]


@pytest.mark.slow
def test_a_run_goes_on_in_other_stages_and_in_one(tmp_path: pathlib.Path) -> None:
    moving, still = tmp_path / "moving", tmp_path / "still"
    assert trained(moving, "pipelined3", 1) == {}
    found = trained(moving, "pipelined2", 2)
    assert found["normalized"] == ["CPU:0"] and found["second"] == found["dense_2"] == ["CPU:1"]
    assert set(found["slots"]) == {"CPU:0", "CPU:1"}
    assert set(trained(still, "one_device", 2)["slots"]) == {"CPU:0"}
    assert_same_bits(load_weights(moving), load_weights(still))


test_a_mistake_is_one_message = each_is_refused(
    call,
    (lambda: Pipelined("second"), "Pipelined.stages is 'second'; write the names of the layers"),
    (lambda: Pipelined([]), "Pipelined.stages is"),
    (lambda: Pipelined(["a"], num_cpu_devices=-1), "Pipelined.num_cpu_devices is -1"),
    (lambda: Pipelined(["a"]).connect(), "has 2 stages, and 0 GPUs. Write fewer stages, or to try them on"),
    (lambda: layers_by_device(staged_model(), ["secnd"], ["a", "b"]), "Did you mean 'second'"),
    (lambda: layers_by_device(staged_model(), ["second", "normalized"], "abc"), "in their order in the model"),
)


NOT_FOR_STAGES = [{"sharding": "optimizer"}, {"sharding": ["second"]}, {"deterministic": 4}]
NOT_FOR_STAGES += [{"recompute": "auto"}, {"xla": "on"}]
test_what_is_not_for_stages_is_told = each_is_refused(
    lambda changes, tmp_path: run(tmp_path, strategy=Pipelined(["second"], num_cpu_devices=2), **changes),
    *((changes, "does not work with the strategy pipelined") for changes in NOT_FOR_STAGES),
)
