"""A process that tests have forked is the one that they would have started."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import forks
import pytest
import support

PROGRAM = pathlib.Path(__file__).with_name("shows_itself.py")


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize(
    "command", [[str(PROGRAM)], ["-c", f"# import tensorflow\n{PROGRAM.read_text()}"]], ids=["script", "program"]
)
def test_a_forked_process_sees_what_a_started_one_does(
    tmp_path: pathlib.Path, command: list[str], session: bool
) -> None:
    seen = []
    for popen in (subprocess.Popen, forks.Popen):
        process = popen(
            [sys.executable, *command, "--flag=1"],
            env=support.clean_environment() | {"TFDIST_TEST_MARK": "m"},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=session,
        )
        stdout, stderr = process.communicate(timeout=120)
        seen.append((json.loads(stdout), stderr, process.returncode))
    assert seen[0] == seen[1]
    told, _, status = seen[1]
    assert (status, told["parent"], told["leads"], told["directory"]) == (7, os.getpid(), session, str(tmp_path))
    assert told["command"][1:] == [*command, "--flag=1"] and told["mark"] == ["TFDIST_TEST_MARK=m"]
