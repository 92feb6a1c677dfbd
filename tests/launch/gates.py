"""Steps at which a training waits until the test has done something to it. Imports nothing of the test."""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

import keras

STEPS = (10, 22, 34)
DIRECTORY = "TFDIST_TEST_GATES"  # in the environment; without it nothing waits
DEADLINE_SECONDS = 120.0


class Gated(keras.callbacks.Callback):
    """Before each of STEPS says who is there, in DIRECTORY/STEP.HOST, and waits for DIRECTORY/STEP.open."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        if step not in STEPS or DIRECTORY not in os.environ:
            return
        directory = pathlib.Path(os.environ[DIRECTORY])
        rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
        here = directory / f"{step}.{os.environ['HOROVOD_HOSTNAME']}"
        part = here.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"rank": rank, "size": size, "child": os.getpid(), "worker": os.getppid()}))
        part.rename(here)
        give_up = time.monotonic() + DEADLINE_SECONDS
        while not (directory / f"{step}.open").exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f"nobody opened the gate before step {step}")
            time.sleep(0.01)
