"""Keeps, of one worker, when it came to which step: a line "SECONDS STEP" in the file that is named by STEPS_FILE.

Seconds are those of `time.time`. Used by recovery.py, in the processes that train.
"""

from __future__ import annotations

import os
import time

import keras
from recovery import STEPS_FILE


class Steps(keras.callbacks.Callback):
    """Only the worker at the machine's first place tells."""

    def on_train_begin(self, logs: object = None) -> None:
        self._file = None
        if os.environ.get("TFDIST_PLACE") == "0":
            self._file = os.open(os.environ[STEPS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._file is not None:
            step = int(self.model.optimizer.iterations.numpy())
            os.write(self._file, f"{time.time():.6f} {step}\n".encode())
