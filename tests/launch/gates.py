"""Steps at which a training waits until the test has done something to it. Imports nothing of the test."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import keras
from launch.ranks import DIRECTORY, rank_and_size

STEPS = (10, 22, 34)
DEADLINE_SECONDS = 120.0


class Gated(keras.callbacks.Callback):
    """Before each of STEPS leaves its process number in DIRECTORY/STEP.RANK.SIZE, and waits for DIRECTORY/STEP.open."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        if step not in STEPS or DIRECTORY not in os.environ:
            return
        directory = pathlib.Path(os.environ[DIRECTORY])
        rank, size = rank_and_size()
        here = directory / f"{step}.{rank}.{size}"
        part = here.with_suffix(f".{os.getpid()}.part")
        part.write_text(str(os.getpid()))
        part.rename(here)
        give_up = time.monotonic() + DEADLINE_SECONDS
        while not (directory / f"{step}.open").exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f"nobody opened the gate before step {step}")
            time.sleep(0.01)
