"""Logs that grow by lines."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from support import clean_environment

from tfdist.storage import files

_APPEND = """
import json, sys
from tfdist.storage import files
log = files.open_log(sys.argv[1])
for n in range(int(sys.argv[3])):
    log.write_line(json.dumps({"writer": int(sys.argv[2]), "n": n, "filling": "x" * 500}))
    print(n, flush=True)
"""


@pytest.mark.slow
def test_processes_that_append_to_one_log_leave_every_line_whole(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    command = [sys.executable, "-c", _APPEND, str(path)]
    writers = [
        subprocess.Popen([*command, str(w), "300"], stdout=subprocess.DEVNULL, env=clean_environment())
        for w in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for writer in range(3):
        assert [line["n"] for line in lines if line["writer"] == writer] == list(range(300))


def test_a_killed_process_loses_no_line_that_it_wrote_to_a_local_log(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    command = [sys.executable, "-c", _APPEND, str(path), "0", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment()) as writer:
        for _ in range(50):
            writer.stdout.readline()
        writer.kill()
        reported = 50 + writer.stdout.read().count(b"\n")
    lines = [json.loads(line)["n"] for line in path.read_text().splitlines()]
    assert lines == list(range(len(lines)))
    assert len(lines) >= reported


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"whole": 1}\n{"to')
    log = files.open_log(path)
    log.write_line('{"whole": 2}')
    log.close()
    log.close()
    assert path.read_text() == '{"whole": 1}\n{"to\n{"whole": 2}\n'
    with pytest.raises(ValueError, match="closed"):
        log.write_line("late")


def test_a_line_break_within_a_line_is_refused(tmp_path: pathlib.Path) -> None:
    log = files.open_log(tmp_path / "log")
    with pytest.raises(ValueError, match="no line break"):
        log.write_line("two\nlines")
    log.close()
