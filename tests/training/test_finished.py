"""A run directory belongs to one run: what a finished one says, how it continues, and what is refused in it."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import keras
import pytest
from checkpoint.checkpoints import steps
from equivalence.cases import dense_model
from equivalence.runs import assert_same_bits
from training.test_resume import BASE, Once, assert_same, fail, memories
from training.trainings import STEPS_PER_EPOCH, Trained, run

from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.errors import UserError

RARE = CheckpointPolicy(every_steps=1000)
EXACT = BASE | {"deterministic": True, "checkpoint": RARE}


def averaged_adam() -> keras.optimizers.Optimizer:
    rate = keras.optimizers.schedules.CosineDecay(4e-3, 6 * STEPS_PER_EPOCH)
    return keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.9)


def lines(trained: Trained) -> list[tuple[int, str]]:
    points = [*trained.points("train"), *trained.points("eval")]
    return sorted((point["step"], point["split"]) for point in points)


@pytest.mark.slow
def test_more_epochs_go_on_as_if_they_had_been_asked_for_at_once(tmp_path: pathlib.Path) -> None:
    """With a schedule, and with averages, which stand in place of the weights when a run is finished."""
    settings = EXACT | {"optimizer": averaged_adam}
    whole = run(tmp_path / "whole", **settings | {"epochs": 4, "callbacks": memories()[1:]})
    first = run(tmp_path / "run", **settings | {"epochs": 2, "callbacks": memories()[1:]})
    assert first.result.steps == 2 * STEPS_PER_EPOCH == first.result.checkpoint_step
    more = run(tmp_path / "run", **settings | {"epochs": 4, "callbacks": memories()[1:]})
    assert_same(more, whole)
    assert lines(more) == lines(whole)
    assert more.points("final") == whole.points("final")
    assert more.result.resumed_from_step == 2 * STEPS_PER_EPOCH
    assert [(start.step, start.lost_steps) for start in more.result.starts] == [(0, 0), (2 * STEPS_PER_EPOCH, 0)]
    (extended,) = more.events("extended")
    assert "was finished at step 14. More is asked for, and it resumes." in extended["details"]["message"]


@pytest.mark.slow
def test_a_run_that_ended_within_an_epoch_goes_on_as_if_it_had_not(tmp_path: pathlib.Path) -> None:
    how = {"epochs": None, "eval_every": "7 steps", "callbacks": memories()}
    whole = run(tmp_path / "whole", **EXACT | how | {"steps": 26})
    for total in (10, 19, 26):
        trained = run(tmp_path / "run", **EXACT | how | {"steps": total})
    assert_same(trained, whole)
    assert lines(trained) == lines(whole)


@pytest.mark.slow
def test_as_many_or_fewer_epochs_leave_nothing_to_train_and_more_no_result_until_they_are_done(
    tmp_path: pathlib.Path,
) -> None:
    first = run(tmp_path, **EXACT | {"epochs": 2})
    result = (tmp_path / "result.json").read_bytes()
    for epochs, said in ((2, "14 steps, 2 epochs, as many as are asked for."), (1, "more than the 7 steps that are")):
        again = run(tmp_path, **EXACT | {"epochs": epochs})
        assert again.result is None and said in again.events("already_finished")[-1]["details"]["message"]
        assert (tmp_path / "result.json").read_bytes() == result
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == len(first.result.starts) == 1
    run(tmp_path, may_fail=True, callbacks=[Once("on_epoch_end", 1, fail)], **EXACT | {"epochs": 3})
    assert not (tmp_path / "result.json").exists()
    assert run(tmp_path, **EXACT | {"epochs": 3}).result.steps == 3 * STEPS_PER_EPOCH


@pytest.mark.slow
def test_more_epochs_move_no_average_that_has_begun(tmp_path: pathlib.Path) -> None:
    averaging = {"optimizer": lambda: keras.optimizers.SGD(0.2, use_ema=True), "swa_start": "0.5 of run"}
    run(tmp_path, **EXACT | averaging | {"epochs": 2})
    refused = run(tmp_path, may_fail=True, **EXACT | averaging | {"epochs": 4}).error
    assert "step from which train.swa_start averages: 7 there, 14 here" in str(refused)


@pytest.mark.slow
def test_without_a_checkpoint_a_finished_run_cannot_go_on(tmp_path: pathlib.Path) -> None:
    run(tmp_path, **EXACT | {"epochs": 1, "checkpoint": "off"})
    result = (tmp_path / "result.json").read_bytes()
    for checkpoint, why in (("off", "train.checkpoint is 'off'"), ("auto", "it kept no checkpoint")):
        refused = run(tmp_path, may_fail=True, **EXACT | {"epochs": 2, "checkpoint": checkpoint}).error
        assert isinstance(refused, UserError) and f"It cannot continue to step 14, because {why}." in str(refused)
        assert "train.start_from = " in str(refused)
    run(tmp_path / "damaged", **EXACT | {"epochs": 1})
    for data in (tmp_path / "damaged" / "checkpoints").glob("*/data-*"):
        data.write_bytes(b"")
    refused = run(tmp_path / "damaged", may_fail=True, **EXACT | {"epochs": 2}).error
    assert isinstance(refused, UserError) and "none of its checkpoints is whole" in str(refused)
    assert (tmp_path / "damaged" / "result.json").exists() and (tmp_path / "result.json").read_bytes() == result


@pytest.mark.slow
def test_a_finished_run_of_other_settings_is_another_experiment_without_checkpoints_too(tmp_path: pathlib.Path) -> None:
    settings = EXACT | {"epochs": 1, "checkpoint": "off"}
    run(tmp_path, named={"train.seed": "1"}, **settings)
    refused = run(tmp_path, may_fail=True, named={"train.seed": "2"}, **settings).error
    assert isinstance(refused, UserError) and "another experiment, which is finished" in str(refused)
    assert "train.seed: 1 there, 2 here" in str(refused) and "accept_changes" not in str(refused)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("result.json", "{}", "it has no 'steps'"),
        ("result.json", "half a", "is damaged"),
        ("result.json", '{"mode": "tune"}', "holds a sweep (result.json)"),
        ("sweep.jsonl", "", "holds a sweep (sweep.jsonl), and this is a training"),
    ],
)
def test_what_is_no_training_s_is_one_message(tmp_path: pathlib.Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    refused = run(tmp_path, may_fail=True, **EXACT).error
    assert isinstance(refused, UserError) and said in str(refused)
    assert re.search("(Give|or give) another --run_dir", str(refused))
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == [name]


# What a run says of its starts and of its end


@pytest.mark.slow
def test_a_start_before_the_first_checkpoint_is_no_going_on(tmp_path: pathlib.Path) -> None:
    run(tmp_path, may_fail=True, callbacks=[Once("on_epoch_end", 2, fail)], **EXACT)
    trained = run(tmp_path, **EXACT | {"epochs": 1})
    assert not trained.events("resumed")
    (anew,) = trained.events("begun_anew")
    assert anew["details"]["message"] == (
        "Beginning anew at step 0: an earlier start of this run was not saved, and at least 14 steps of it are lost."
    )
    assert [(start.step, start.lost_steps) for start in trained.result.starts] == [(0, 0), (0, 14)]


@pytest.mark.slow
def test_what_was_lost_is_counted_and_said(tmp_path: pathlib.Path) -> None:
    once = EXACT | {"checkpoint": CheckpointPolicy(every_steps=6)}
    run(tmp_path, may_fail=True, callbacks=[Once("on_epoch_end", 1, fail)], **once)
    trained = run(tmp_path, **once)
    (resumed,) = trained.events("resumed")
    assert (resumed["step"], resumed["details"]["lost_steps"]) == (6, 1)
    assert "At least 1 steps after it were lost" in resumed["details"]["message"]
    assert [(start.step, start.lost_steps) for start in trained.result.starts] == [(0, 0), (6, 1)]


@pytest.mark.slow
def test_a_run_says_why_it_ended_and_what_was_best(tmp_path: pathlib.Path) -> None:
    impatient = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=10.0, restore_best_weights=True)
    trained = run(tmp_path, **EXACT | {"epochs": 9, "callbacks": [impatient]})
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["mode"], result["end_reason"], result["stopped_by"]) == ("train", "early_stopping", "EarlyStopping")
    evaluations = {point["loss"]: point for point in trained.points("eval")}
    best = evaluations[min(evaluations)]
    expected = {"metric": "val_loss", "value": best["loss"], "epoch": best["epoch"], "step": best["step"]}
    assert result["best"] == expected
    (stopped,) = trained.events("stopped_early")
    said = stopped["details"]["message"]
    assert said == "EarlyStopping stopped the training at step 14 of 63, the end of epoch 2."
    again = run(tmp_path, **EXACT | {"epochs": 20, "callbacks": [impatient]})
    assert again.result is None
    assert "then EarlyStopping stopped it" in again.events("already_finished")[0]["details"]["message"]
    hardware = result["hardware"]
    assert hardware["devices"] == {"CPU": 1} and hardware["cpus"] >= 1 and hardware["memory_bytes"] > 2**28


# The best


@pytest.mark.slow
@pytest.mark.parametrize(("split", "metric"), [("eval", "val_loss"), ("train", "loss")])
def test_each_new_best_is_backed_up_and_no_part_of_an_epoch_is_one(
    tmp_path: pathlib.Path, split: str, metric: str
) -> None:
    policy = CheckpointPolicy(every_steps=STEPS_PER_EPOCH + 1, keep_last=1, keep_best=metric)
    rises = keras.callbacks.LambdaCallback()
    rises.on_epoch_end = lambda epoch, logs=None: setattr(rises.model.optimizer, "learning_rate", 1e3)
    trained = run(tmp_path, **EXACT | {"callbacks": [rises], "checkpoint": policy, "optimizer": keras.optimizers.SGD})
    ends = [point for point in trained.points(split) if point["step"] % STEPS_PER_EPOCH == 0]
    losses = {point["step"]: point["loss"] for point in ends}
    best = min(losses, key=losses.get)
    assert best < 4 * STEPS_PER_EPOCH == trained.result.steps
    kept = {}
    for path in (tmp_path / "checkpoints").iterdir():
        content = json.loads((path / "manifest.json").read_text())
        kept[content["step"]] = content["metrics"][metric]
    assert kept == {best: losses[best], trained.result.steps: losses[trained.result.steps]}
    assert trained.result.best["step"] == best


@pytest.mark.slow
def test_a_best_survives_a_restart(tmp_path: pathlib.Path) -> None:
    policy = CheckpointPolicy(every_steps=1000, keep_best="val_loss")
    whole = run(tmp_path / "whole", **EXACT | {"checkpoint": policy})
    run(
        tmp_path / "parts", may_fail=True, callbacks=[Once("on_epoch_begin", 3, fail)], **EXACT | {"checkpoint": policy}
    )
    trained = run(tmp_path / "parts", **EXACT | {"checkpoint": policy})
    assert trained.result.resumed_from_step == 2 * STEPS_PER_EPOCH  # backed up for its evaluation alone
    assert_same(trained, whole)
    assert trained.result.best == whole.result.best


@pytest.mark.slow
@pytest.mark.parametrize("first", ["val_loss", "loss"])
def test_a_best_that_no_checkpoint_has_is_told_and_the_next_as_good_is_kept(tmp_path: pathlib.Path, first: str) -> None:
    still = EXACT | {"model": dense_model, "optimizer": lambda: keras.optimizers.SGD(0.0)}
    policies = [CheckpointPolicy(every_steps=10, keep_last=1, keep_best=metric) for metric in (first, "val_loss")]
    fails = {"callbacks": [Once("on_train_batch_end", 12, fail)], "checkpoint": policies[0]}
    run(tmp_path, may_fail=True, **still | fails)
    (best,) = (tmp_path / "checkpoints").glob("step-000000000007-*")
    shutil.rmtree(best)
    trained = run(tmp_path, **still | {"checkpoint": policies[1]})
    assert trained.result.resumed_from_step == 10
    assert trained.result.best["step"] == STEPS_PER_EPOCH
    assert steps(list_checkpoints(str(tmp_path / "checkpoints"))) == [2 * STEPS_PER_EPOCH, 4 * STEPS_PER_EPOCH]


# What is left out


@pytest.mark.slow
def test_a_partial_restore_names_what_it_left_out_both_ways(tmp_path: pathlib.Path) -> None:
    source = run(tmp_path / "source", **EXACT | {"epochs": 1})

    def other() -> keras.Model:
        inputs = keras.Input((64,))
        x = keras.layers.Activation("tanh")(keras.layers.Dense(16, name="body")(inputs))
        x = keras.layers.Dense(12, name="middle")(x)
        return keras.Model(inputs, keras.layers.Dense(10, name="head")(x))

    # At a rate of 0 a training leaves what it began with.
    still = EXACT | {"epochs": 1, "model": other, "optimizer": lambda: keras.optimizers.SGD(0.0)}
    refused = run(tmp_path / "refused", may_fail=True, **still | {"start_from": str(source.directory)}).error
    assert isinstance(refused, UserError) and "body" not in str(refused)
    assert "head/kernel: float32[16, 10] in the checkpoint, float32[12, 10] here" in str(refused)
    told = {}
    for name, path in {"checkpoint": source.directory, "file": source.directory / "export" / "model.keras"}.items():
        trained = run(tmp_path / name, **still | {"start_from": str(path), "accept_changes": True})
        assert_same_bits(*(each.model.get_layer("body").get_weights() for each in (trained, source)))
        (event,) = trained.events("partially_restored")
        assert event["level"] == "warning"
        told[name] = event["details"]["left_out"]
        assert all(line in event["details"]["message"] for line in told[name])
    assert "head/kernel: float32[16, 10] in the checkpoint, float32[12, 10] here" in told["checkpoint"]
    assert "middle/kernel float32[16, 12]: not in the checkpoint." in told["checkpoint"]
    assert "batch_normalization/gamma float32[16]: only in the checkpoint" in told["checkpoint"]
    assert not [line for lines in told.values() for line in lines if "body" in line]
    assert all(f"name={name}" in told["file"][0] for name in ("middle", "head"))
    fitting = {"epochs": 1, "start_from": str(source.directory), "accept_changes": True}
    assert not run(tmp_path / "whole", **EXACT | fitting).events("partially_restored")
