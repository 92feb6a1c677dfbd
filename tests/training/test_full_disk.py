"""A disk that fills up while a run trains: the kernel itself refuses the writes, by RLIMIT_FSIZE."""

from __future__ import annotations

import json
import pathlib
import re
import resource
import signal
from typing import Any

import pytest
from training.test_resume import BASE, Once, send
from training.trainings import Trained, run

from tfdist.errors import EXIT_NOT_SAVED, EXIT_PREEMPTED, NotSavedError, PreemptedError
from tfdist.telemetry import events

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """What the run prints, which pytest keeps in a file otherwise."""
    monkeypatch.setattr(events, "RETRY_SECONDS", 0.0)
    return capsys


def limit(num_bytes: int) -> None:
    """Has the kernel refuse to make any file longer than that; -1 for no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def trained(directory: pathlib.Path, **changes: Any) -> Trained:
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
    ended = trained(tmp_path, epochs=5, callbacks=[full, room])
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


def test_a_run_that_could_not_save_ends_so_where_its_logs_could_not_be_written_either(tmp_path: pathlib.Path) -> None:
    full = Once("on_train_batch_end", 3, lambda: limit(0))
    term = Once("on_train_batch_end", 4, send(signal.SIGTERM))
    ended = trained(tmp_path, callbacks=[full, term])
    assert isinstance(ended.error, NotSavedError) and ended.error.exit_status == EXIT_NOT_SAVED


def test_a_run_that_has_saved_ends_so_where_its_events_could_not_be_written(tmp_path: pathlib.Path) -> None:
    def fill() -> None:
        with open(tmp_path / "events.jsonl", "a") as events:
            events.write(json.dumps({"event": "x" * 500_000}) + "\n")
        limit(400_000)

    term = Once("on_train_batch_end", 4, send(signal.SIGTERM))
    ended = trained(tmp_path, callbacks=[Once("on_train_batch_end", 3, fill), term])
    assert isinstance(ended.error, PreemptedError) and ended.error.exit_status == EXIT_PREEMPTED
    assert not ended.events("preempted")
    assert run(tmp_path, **BASE).events("resumed")
