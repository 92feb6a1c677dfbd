"""TensorBoard's HParams table of a sweep, as TensorBoard itself answers for it."""

from __future__ import annotations

import pathlib

import pytest
import support
from tensorboards import tensorboard
from tuning.sweeps import ACCURACY, Sweep, arguments

RATE, SIZE, CALLS = "keras.optimizers.SGD.learning_rate", "train.eval_batch_size", "train.steps_per_call"
SPACE = f"""{{
    '{RATE}': @space.choice(values=[0.1, 1e30]),
    '{SIZE}': @space.integer(low=100, high=200),
    '{CALLS}': @space.choice(values=[None, 5]),
}}"""
ENDS = {"done": "STATUS_SUCCESS", "infeasible": "STATUS_FAILURE"}


@pytest.mark.slow
def test_tensorboard_shows_each_trial_with_its_values_metrics_and_end(
    gin_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    parameters = [
        f"tune.space = {SPACE}",
        "tune.seed = 1",
        "tune.max_trials = 3",
        "train.epochs = 1",
        "tiny.linear.units = 8",
    ]
    support.run_python(["-m", "tfdist.main", *arguments(gin_file, tmp_path / "sweep", *parameters)]).check()
    sweep = Sweep(tmp_path / "sweep")
    asked = {"startIndex": 0, "sliceSize": 10, "colParams": [{"hparam": name} for name in (RATE, SIZE, CALLS)]}
    asked |= {"allowedStatuses": list(ENDS.values())}
    with tensorboard(sweep.directory) as server:
        experiment = server.ask("hparams/experiment", {"experimentName": ""})
        groups = server.ask("hparams/session_groups", asked)["sessionGroups"]
        texts = server.ask("text/tags")
    assert {each["name"] for each in experiment["hparamInfos"]} >= {RATE, SIZE, CALLS}
    ends = {event["trial"]: event for event in sweep.ends}
    assert {end["status"] for end in ends.values()} == set(ENDS) and len(groups) == len(ends) == 3
    for group in groups:
        name = group["name"]
        (started,) = sweep.of("trial_started", trial=name)
        values = started["values"]
        assert group["hparams"] == {RATE: values[RATE], SIZE: values[SIZE], CALLS: f"{values[CALLS]}"}
        assert [each["status"] for each in group["sessions"]] == [ENDS[ends[name]["status"]]]
        if ends[name]["status"] == "done":
            shown = {(each["name"]["group"], each["name"]["tag"]): each["value"] for each in group["metricValues"]}
            assert shown["eval", ACCURACY.removeprefix("val_")] == pytest.approx(ends[name]["objective"])
            assert texts[f"trials/{name}/tensorboard"] == ["config.gin"]
