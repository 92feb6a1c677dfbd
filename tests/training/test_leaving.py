"""A run that is told to leave says truly what is saved, and ends as it was told to."""

from __future__ import annotations

import json
import pathlib
import re
import resource
import signal
from typing import Any

import keras
import pytest
from training.test_resume import BASE, Once, assert_same, interrupted, memories, send
from training.trainings import STEPS_PER_EPOCH, Trained, run

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.write import manager
from tfdist.errors import EXIT_INTERRUPTED, EXIT_NOT_SAVED, EXIT_PREEMPTED, NotSavedError, PreemptedError
from tfdist.telemetry import events

pytestmark = pytest.mark.slow

RARE = CheckpointPolicy(every_steps=1000)


def left(directory: pathlib.Path, number: int, **changes: Any) -> Trained:
    """A start that gets a signal at the end of its fourth batch, and so leaves after the fifth."""
    callbacks = [*memories(), Once("on_train_batch_end", 4, send(number))]
    return run(directory, may_fail=True, **BASE | {"callbacks": callbacks, "checkpoint": RARE} | changes)


def without_a_store(directory: pathlib.Path) -> pathlib.Path:
    directory.mkdir()
    (directory / "checkpoints").symlink_to("/proc/sys/vm")  # where even the superuser makes nothing
    return directory


def test_a_signal_costs_no_step(tmp_path: pathlib.Path, undisturbed: Trained) -> None:
    # Each comes in a start's fourth step. All agree to leave in the call after it, or at the end of the epoch.
    steps = {signal.SIGTERM: 5, signal.SIGUSR1: 10, signal.SIGHUP: 14, signal.SIGINT: 19}
    for number, step in steps.items():
        ended = left(tmp_path, number)
        status = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_PREEMPTED
        assert isinstance(ended.error, PreemptedError) and ended.error.exit_status == status
        said = f"Left at step {step} after saving, because {signal.Signals(number).name} was received"
        assert said in str(ended.error) and said in ended.events("preempted")[-1]["details"]["reason"]
        hint = "A second Ctrl-C ends at once" in ended.events("preemption_noticed")[-1]["details"]["message"]
        assert hint == (number == signal.SIGINT)
    trained = interrupted(tmp_path, checkpoint=RARE)
    assert [event["step"] for event in trained.events("resumed")] == list(steps.values())
    assert_same(trained, undisturbed)


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_step(tmp_path: pathlib.Path) -> None:
    def twice() -> None:
        send(signal.SIGINT)()
        send(signal.SIGINT)()

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **BASE | {"callbacks": [Once("on_train_batch_end", 4, twice)], "checkpoint": RARE})
    assert not list((tmp_path / "checkpoints").glob("*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_shell_or_nohup_has_ignored_stays_so(tmp_path: pathlib.Path) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        send_both = [Once("on_train_batch_end", 2, send(number)) for number in before]
        assert run(tmp_path, **BASE | {"epochs": 1, "callbacks": send_both}).result.steps == STEPS_PER_EPOCH
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_leaving_without_a_store_says_that_all_is_lost(tmp_path: pathlib.Path) -> None:
    ended = left(without_a_store(tmp_path / "run"), signal.SIGTERM)
    assert isinstance(ended.error, NotSavedError) and ended.error.exit_status == EXIT_NOT_SAVED
    assert str(ended.error) == (
        "Left at step 5, because SIGTERM was received, and could not save. There is no checkpoint: the work of all 5 "
        "steps is lost, and the same command begins anew."
    )
    (failed,) = [event for event in ended.events("checkpoint_failed") if event["step"] == 5]
    assert "Training continues" not in failed["details"]["message"]
    assert not ended.events("preempted") and len(ended.events("left_unsaved")) == 1
    paused = run(without_a_store(tmp_path / "paused"), may_fail=True, **BASE | {"stop_after_epochs": 1})
    assert isinstance(paused.error, NotSavedError)
    assert "because train.stop_after_epochs asks for it, and could not save" in str(paused.error)
    assert not paused.events("run_paused")


def test_leaving_says_from_which_checkpoint_a_start_goes_on(
    tmp_path: pathlib.Path, undisturbed: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = manager.write_checkpoint, []

    def write_once(path: str, snapshot: Any, **settings: Any) -> Any:
        if written:
            raise OSError(28, "No space left on device")
        written.append(snapshot.step)
        return write(path, snapshot, **settings)

    monkeypatch.setattr(manager, "write_checkpoint", write_once)
    ended = left(tmp_path, signal.SIGTERM, checkpoint=CheckpointPolicy(every_steps=3))
    assert written == [3]
    assert "The newest checkpoint is of step 3: the work of the 2 steps after it is lost" in str(ended.error)
    again = left(tmp_path, signal.SIGTERM, checkpoint=CheckpointPolicy(every_steps=1000))  # now of an earlier process
    assert "The newest checkpoint is of step 3" in str(again.error)
    monkeypatch.undo()
    assert_same(interrupted(tmp_path), undisturbed)


def test_a_signal_during_the_last_evaluation_leaves_what_is_made_of_the_checkpoint_for_the_next_start(
    tmp_path: pathlib.Path,
) -> None:
    """Of averaged weights, which are evaluated once more at the end."""
    changes = BASE | {"optimizer": lambda: keras.optimizers.SGD(0.05, use_ema=True), "epochs": 1, "eval_batch_size": 16}
    whole = run(tmp_path / "whole", **changes)
    sends = keras.callbacks.LambdaCallback(on_train_end=lambda logs: send(signal.SIGTERM)())
    ended = run(tmp_path / "parts", may_fail=True, **changes | {"callbacks": [sends]})
    assert isinstance(ended.error, PreemptedError) and not (tmp_path / "parts" / "result.json").exists()
    assert_same(run(tmp_path / "parts", **changes), whole)


# A disk that fills up


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """What the run prints, which pytest keeps in a file otherwise."""
    monkeypatch.setattr(events, "RETRY_SECONDS", 0.0)
    return capsys


def limit(num_bytes: int) -> None:
    """Has the kernel refuse to make any file longer than that; -1 for no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def on_a_disk_that_fills(directory: pathlib.Path, **changes: Any) -> Trained:
    """A run whose callbacks may set a limit, which ends with it."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        return run(directory, may_fail=True, **BASE | changes)
    finally:
        limit(-1)
        signal.signal(signal.SIGXFSZ, ignored)


def test_training_continues_and_says_what_of_its_logs_is_missing(
    tmp_path: pathlib.Path, printed: pytest.CaptureFixture[str]
) -> None:
    full, room = Once("on_epoch_end", 1, lambda: limit(0)), Once("on_epoch_end", 3, lambda: limit(-1))
    ended = on_a_disk_that_fills(tmp_path, epochs=5, callbacks=[full, room])
    assert ended.result.epochs == 5
    said = printed.readouterr().err
    for name in ("metrics", "events"):
        assert said.count(f"{name}.jsonl cannot be written: File too large. The run continues") == 1
        assert re.search(rf"[0-9]+ lines of {tmp_path}/{name}.jsonl could not be written", said)
    assert said.count("tensorboard gets no more summaries, and the run continues: ") == 1
    told = [event["details"]["message"] for event in ended.events("log_not_written")]
    told = [message for message in told if "/telemetry/" not in message]  # where a sample was due meanwhile
    assert len(told) == 1 and re.match(r"[0-9]+ lines of .*metrics.jsonl", told[0])
    assert {point["epoch"] for point in ended.points("eval")} == {1, 4, 5}


@pytest.mark.usefixtures("printed")
def test_a_run_that_could_not_save_ends_so_where_its_logs_could_not_be_written_either(tmp_path: pathlib.Path) -> None:
    full = Once("on_train_batch_end", 3, lambda: limit(0))
    term = Once("on_train_batch_end", 4, send(signal.SIGTERM))
    ended = on_a_disk_that_fills(tmp_path, callbacks=[full, term])
    assert isinstance(ended.error, NotSavedError) and ended.error.exit_status == EXIT_NOT_SAVED


@pytest.mark.usefixtures("printed")
def test_a_run_that_has_saved_ends_so_where_its_events_could_not_be_written(tmp_path: pathlib.Path) -> None:
    def fill() -> None:
        with open(tmp_path / "events.jsonl", "a") as events:
            events.write(json.dumps({"event": "x" * 500_000}) + "\n")
        limit(400_000)

    term = Once("on_train_batch_end", 4, send(signal.SIGTERM))
    ended = on_a_disk_that_fills(tmp_path, callbacks=[Once("on_train_batch_end", 3, fill), term])
    assert isinstance(ended.error, PreemptedError) and ended.error.exit_status == EXIT_PREEMPTED
    assert not ended.events("preempted")
    assert run(tmp_path, **BASE).events("resumed")
