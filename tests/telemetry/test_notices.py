"""What the input pipeline passed over reaches events.jsonl once, from whichever thread it came."""

from __future__ import annotations

import json
import pathlib
import threading

import pytest

from tfdist.telemetry import notices
from tfdist.telemetry.console.console import open_console
from tfdist.telemetry.logs.events import EventLog
from tfdist.telemetry.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> RunDirectory:
    found = RunDirectory(str(tmp_path))
    found.create()
    return found


def told(directory: RunDirectory) -> list[tuple[str, str, int]]:
    lines = [json.loads(line) for line in pathlib.Path(directory.events).read_text().splitlines()]
    return [(line["level"], line["event"], line["details"]["record"]) for line in lines]


def test_notices_of_other_threads_are_warnings_among_the_events(directory: RunDirectory) -> None:
    console = open_console(is_chief=True)
    events = EventLog(directory, worker=0, is_chief=True, console=console)
    with notices.listening(events):
        for record in (3, 4):
            thread = threading.Thread(target=notices.give, args=("record_corrupt", "wrong"), kwargs={"record": record})
            thread.start()
            thread.join()
        notices.drain(events)
        notices.give("record_corrupt", "wrong", record=5)
    events.close()
    console.close()
    assert told(directory) == [("warning", "record_corrupt", record) for record in (3, 4, 5)]


@pytest.mark.slow
def test_without_a_run_a_notice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    notices.give("record_corrupt", "Record 3 is wrong.", record=3)
    assert "Record 3 is wrong." in caplog.text
