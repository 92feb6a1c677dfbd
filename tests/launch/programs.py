"""Runs of the launcher with small programs in place of tfdist.main, as real processes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import support
from processes import Running

DEADLINE_SECONDS = 90.0
both_launchers = pytest.mark.parametrize("launcher", ["tf_config", pytest.param("horovod", marks=pytest.mark.horovod)])

# The worker's part of every program: its index, a way to wait for what another did, and a mark of being alive.
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(__file__).parent
if "TF_CONFIG" in os.environ:
    config = json.loads(os.environ["TF_CONFIG"])
    index = config["task"]["index"]
else:
    index = int(os.environ["HOROVOD_RANK"])
def wait_for(name):
    deadline = time.monotonic() + 40
    while not (here / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
def mark(name, text=""):
    (here / (name + ".part")).write_text(str(text))
    (here / (name + ".part")).rename(here / name)
mark(f"pid{index}", os.getpid())
"""


class Run(Running):
    """A launcher that runs a program in `directory`; what it says on stdout and on stderr stays apart."""

    is_forked = False
    poll_seconds = 0.001

    def __init__(self, directory: Path, *arguments: str, **how: Any) -> None:
        self.directory = directory
        number = len(list(directory.glob("*.stderr")))
        self._stderr = directory / f"{number}.stderr"
        paths = {"PYTHONPATH": f"{directory}{os.pathsep}{support.REPOSITORY}"}
        with self._stderr.open("wb") as stderr:
            how = {"stderr": stderr, "variables": os.environ | paths} | how
            super().__init__([sys.executable, "-m", "tfdist.launch", *arguments], directory / f"{number}.stdout", **how)

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_for(self, *names: str) -> None:
        """Waits until the workers have left these marks."""
        self.until(lambda: all((self.directory / name).exists() for name in names), timeout=DEADLINE_SECONDS)

    def read_pid(self, name: str) -> int:
        self.wait_for(name)
        return int((self.directory / name).read_text())

    def finish(self) -> tuple[int, list[str], list[str]]:
        """Status, lines of stdout and lines of stderr."""
        return self.end(timeout=DEADLINE_SECONDS), self.output.splitlines(), self.stderr.splitlines()


def assert_gone(pid: int, within_seconds: float = 5.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not support.is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


# What a worker of tfdist.main shows and tells, without TensorFlow; and which start this is, from 1.
SHOWING = """
from tfdist.telemetry import heartbeat
heartbeat.begin(os.environ[heartbeat.VARIABLE])
run_dir = here / "run"
heartbeat.add_exit_info(run_dir=str(run_dir))
slot = int(os.environ["TFDIST_SLOT"])
start = 1
while (here / f"start{slot}-{start}").exists():
    start += 1
mark(f"start{slot}-{start}")
"""
