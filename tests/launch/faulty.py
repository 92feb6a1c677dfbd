"""Workers that fail, each fault once in a run, however often that is started.

TFDIST_TEST_FAULTS names a directory with faults.json, a list of [KIND, SLOT, STEP]. A worker takes a fault by making a
file there, so a start that comes later does not meet it again. Faults of a start have the number of that start, counted
from 1, in place of the step.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from crashes import experiment

from tfdist.training.recovery.recovery import Recovery

DIRECTORY = "TFDIST_TEST_FAULTS"
SLOT = int(os.environ.get("TFDIST_SLOT", "0"))
AT_START = ("never_starts", "port_taken", "dies_at_once")
LISTEN = """
import socket, sys, time
with socket.socket() as taken:
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", int(sys.argv[1])))
    taken.listen()
    print("listening", flush=True)
    time.sleep(600)
"""


def take(kinds: tuple[str, ...], *, at: int, at_start: bool) -> str | None:
    """The fault of one of these kinds that is due here and now, taken from the list."""
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return None
    faults = json.loads(pathlib.Path(directory, "faults.json").read_text())
    for number, (kind, slot, when) in enumerate(faults):
        is_due = kind in kinds and slot == SLOT and (when == at if at_start else when <= at)
        if is_due and not pathlib.Path(directory, f"taken{number}").exists():
            pathlib.Path(directory, f"taken{number}").touch()
            return kind
    return None


def fail(kind: str | None) -> None:
    """Has this process fail."""
    match kind:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        case "raises":
            Recovery.votes = None  # a bug of tfdist's; what a user's callback raises is the user's error, and final
        case "blocked" | "never_starts":
            time.sleep(600)
        case "dies_at_once":
            os._exit(9)
        case "port_taken":
            port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][SLOT].rpartition(":")[2]
            listener = subprocess.Popen([sys.executable, "-c", LISTEN, port], stdout=subprocess.PIPE)
            listener.stdout.readline()


class Faults(keras.callbacks.Callback):
    """Fails behind the step at which that is due."""

    step = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        Faults.step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        fail(take(("killed", "stopped", "terminated", "raises", "blocked"), at=Faults.step, at_start=False))


def make_dataset(num_examples: int) -> tf.data.Dataset:
    """The digits one by one, each of them through Python, where a worker can get stuck."""
    images, labels = experiment.read_digits(num_examples)

    def passed(label: np.ndarray) -> np.ndarray:
        if take(("input_stuck",), at=Faults.step, at_start=False):
            time.sleep(600)
        return label

    def read(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return image, tf.ensure_shape(tf.numpy_function(passed, [label], label.dtype), [])

    return tf.data.Dataset.from_tensor_slices((images, labels)).map(read)


def build_plain_model() -> keras.Model:
    """Without statistics of batches and without dropout."""
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Dense(24, activation="tanh")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(10, name="head")(x))


def _count_start() -> int:
    """Which start of the run this is, for this slot."""
    directory = pathlib.Path(os.environ[DIRECTORY])
    number = 1
    while (directory / f"start{SLOT}-{number}").exists():
        number += 1
    (directory / f"start{SLOT}-{number}").touch()
    return number


if os.environ.get(DIRECTORY):
    fail(take(AT_START, at=_count_start(), at_start=True))
