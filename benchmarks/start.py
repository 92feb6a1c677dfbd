"""How long from a command to its first step, beside a plain Keras script of the same model and data.

The peer compiles the model, and calls `fit`; it parses no configuration, makes no run directory and saves nothing. The
second figure is that of a run which was killed, and resumes from its checkpoint. Takes two minutes on two cores.

    python benchmarks/start.py [--quick] [--json=FILE]
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import keras
from measuring import HERE, Figure, build_environment, make_ratio, report, take_samples

ROUNDS, QUICK_ROUNDS = 11, 3
GOAL = 0.6
STEP_FILE = "TFDIST_BENCHMARK_STEP"  # in the environment: where to tell of the first step


def measure(*, quick: bool) -> Iterator[list[Figure]]:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        peer = functools.partial(
            _time_first_step, scratch, [sys.executable, "-c", "import start; start.train_by_keras()"]
        )
        killed = f"{scratch}/killed"
        _time_first_step(scratch, _build_command(killed), "45")
        begun = [0]

        def anew() -> float:
            begun[0] += 1
            return _time_first_step(scratch, _build_command(f"{scratch}/{begun[0]}"))

        samples = take_samples(
            [anew, functools.partial(_time_first_step, scratch, _build_command(killed)), peer], rounds
        )
    told = {"unit": "s", "at_most": True}
    yield [
        make_ratio("from the command to the first step ÷ a plain Keras script", samples[0], samples[2], GOAL, **told),
        make_ratio("… of a run that was killed, from its checkpoint", samples[1], samples[2], GOAL, **told),
    ]


def _build_command(run_dir: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.main", "--gin_file=benchmarks/start.gin", f"--run_dir={run_dir}"]


def _time_first_step(scratch: str, command: list[str], steps: str = "1") -> float:
    """Until a process has done so many steps, after which it ends itself as a kill would."""
    path = Path(scratch) / "step"
    path.unlink(missing_ok=True)
    environment = build_environment(TF_CPP_MIN_LOG_LEVEL="3", **{STEP_FILE: f"{steps} {path}"})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
    started = time.time()
    subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, check=False)
    return float(path.read_text()) - started


class EndsSoon(keras.callbacks.Callback):
    """Tells when a training has done its first steps, and ends the process."""

    def on_train_begin(self, logs: object = None) -> None:
        steps, self._path = os.environ[STEP_FILE].split(maxsplit=1)
        self._left = int(steps)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._left -= 1
        if not self._left:
            Path(self._path).write_text(f"{time.time():.6f}")
            os._exit(0)


def train_by_keras() -> None:
    """The peer: a plain Keras script."""
    from sklearn.datasets import load_digits

    from tfdist.models.convnet import build_convnet  # of Keras's layers alone

    images, labels = load_digits(return_X_y=True)
    model = build_convnet(input_shape=(8, 8, 1), num_classes=10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss=loss, metrics=["accuracy"])
    x = (images / 16).astype("float32").reshape([-1, 8, 8, 1])
    model.fit(x, labels, batch_size=64, verbose=0, callbacks=[EndsSoon()])


if __name__ == "__main__":
    report(__doc__, measure, has_quick=True)
