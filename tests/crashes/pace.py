"""How fast a run of the experiment may go, and how far its checkpoints are. Imports no Keras."""

from __future__ import annotations

import os
import pathlib
import time

PACE = "TFDIST_CRASH_PACE"  # in the environment, "SECONDS:RUN_DIR"; "SECONDS" waits for no checkpoint
DEADLINE_SECONDS = 60.0


def end_step(step: int) -> None:
    """Makes `step` take as long as a real model's: some time, and longer than writing the one before takes."""
    seconds, _, run_dir = os.environ.get(PACE, "").partition(":")
    if not seconds:
        return
    time.sleep(float(seconds))
    give_up = time.monotonic() + DEADLINE_SECONDS
    while run_dir and newest_step(pathlib.Path(run_dir, "checkpoints")) < step - 1:
        if time.monotonic() > give_up:
            raise TimeoutError(f"the checkpoint of step {step - 1} was not committed within {DEADLINE_SECONDS} s")
        time.sleep(0.001)


def newest_step(checkpoints: pathlib.Path) -> int:
    """The newest step with a manifest, by names alone; 0 without one. Any moment is a good one to ask."""
    try:
        names = sorted(os.listdir(checkpoints), reverse=True)
    except FileNotFoundError:
        return 0
    return next((int(name.split("-")[1]) for name in names if (checkpoints / name / "manifest.json").exists()), 0)
