"""The fixture that starts launchers, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.programs import PRELUDE, ROOT, Run


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Run]:
    runs: list[Run] = []

    def start(program: str, *arguments: str, options: tuple[str, ...] = (), workers: int = 2) -> Run:
        (tmp_path / "program.py").write_text(PRELUDE + program)
        command = [sys.executable, "-m", "tfdist.launch", f"--workers={workers}", "--module=program", *options]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        runs.append(
            Run(
                tmp_path,
                subprocess.Popen(
                    [*command, "--", *(arguments or ("x",))],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                ),
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.communicate(timeout=20)
            run.process.kill()
