"""How soon a lost worker is noticed, and how soon training continues.

Two workers train the digits under `python -m tfdist.launch --max_restarts`. One of them gets SIGKILL, and SIGSTOP once
training continues. A cold start is the time from the command to its first step; recovering that from the signal to the
first step that had not been done before, with the two seconds of waiting before a restart. A round takes a minute
on two cores.

    python benchmarks/recovery.py [--json=FILE] [--part=tf_config|horovod] [--quick]
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
import psutil
from measuring import HERE, Figure, build_environment, choose_size, make_ratio, report

STEPS_FILE = "TFDIST_BENCHMARK_STEPS"  # in the environment of the workers: where to tell of steps
PARTS = ("tf_config", "horovod")
ROUNDS, QUICK_ROUNDS = 3, 1
WAIT_SECONDS = 180.0
STEPS_BEFORE_A_FAULT = choose_size(300, 20)


@dataclasses.dataclass(frozen=True)
class Round:
    """Seconds, all of one launch."""

    cold_start: float
    kill_noticed: float
    kill_recovered: float
    stop_noticed: float
    stop_recovered: float


class Steps(keras.callbacks.Callback):
    """In a worker: keeps when it came to which step, a line "SECONDS STEP" in the file that STEPS_FILE names.

    Seconds are those of `time.time`. Only the worker at the machine's first place tells.
    """

    def on_train_begin(self, logs: object = None) -> None:
        self._file = None
        if os.environ.get("TFDIST_SLOT") == "0":
            self._file = os.open(os.environ[STEPS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._file is not None:
            step = int(self.model.optimizer.iterations.numpy())
            os.write(self._file, f"{time.time():.6f} {step}\n".encode())


def measure(parts: Sequence[str], *, quick: bool) -> Iterator[list[Figure]]:
    for launcher in parts:
        rounds = [_measure_round(launcher) for _ in range(QUICK_ROUNDS if quick else ROUNDS)]
        cold = [each.cold_start for each in rounds]
        killed, stopped = [each.kill_recovered for each in rounds], [each.stop_recovered for each in rounds]
        told = {"unit": "s", "at_most": True}
        yield [
            make_ratio(
                f"{launcher}: from SIGKILL to a new step ÷ a cold start to the first", killed, cold, 1.3, **told
            ),
            make_ratio(
                f"{launcher}: from SIGSTOP to a new step ÷ a cold start to the first", stopped, cold, None, **told
            ),
            _make_figure(f"{launcher}: until SIGKILL is noticed", [each.kill_noticed for each in rounds], 1.0),
            _make_figure(f"{launcher}: until SIGSTOP is noticed", [each.stop_noticed for each in rounds], 10.0),
        ]


def _make_figure(name: str, samples: Sequence[float], goal: float) -> Figure:
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else list(samples) * 3
    return Figure(name, middle, goal, (low, high), middle, math.nan, "s", True, "s")


def _measure_round(launcher: str) -> Round:
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        steps = Path(scratch) / "steps"
        begun = time.time()
        with _launch(launcher, Path(scratch), steps) as (process, said):
            cold_start = _wait_for_step(process, steps, 0) - begun
            kill_noticed, kill_recovered = _cause_fault(process, steps, said, signal.SIGKILL)
            stop_noticed, stop_recovered = _cause_fault(process, steps, said, signal.SIGSTOP)
        return Round(cold_start, kill_noticed, kill_recovered, stop_noticed, stop_recovered)


def _cause_fault(
    process: subprocess.Popen[str], steps: Path, said: list[tuple[float, str]], number: int
) -> tuple[float, float]:
    """Signals the second worker; the seconds until the launcher named it, and until a step that was not yet done."""
    _wait_for_step(process, steps, _read_newest(steps) + STEPS_BEFORE_A_FAULT)
    (victim,) = [child for child in psutil.Process(process.pid).children(recursive=True) if _is_second_worker(child)]
    already_said = len(said)
    struck = time.time()
    victim.send_signal(number)
    word = " hangs: " if number == signal.SIGSTOP else " ended with status 137"
    _wait(process, lambda: any(word in line for _, line in said[already_said:]), word)
    noticed = next(moment for moment, line in said[already_said:] if word in line)
    before = max(step for moment, step in _read_lines(steps) if moment <= noticed)
    return noticed - struck, _wait_for_step(process, steps, before) - struck


@contextlib.contextmanager
def _launch(
    launcher: str, scratch: Path, steps: Path
) -> Iterator[tuple[subprocess.Popen[str], list[tuple[float, str]]]]:
    """A launcher at work, and what it says of its own accord, with the moments."""
    strategy = "horovod" if launcher == "horovod" else "multi_worker"
    gin_files = [str(HERE / "recovery.gin"), f"configs/strategies/{strategy}.gin"]
    worker = [f"--gin_file={name}" for name in gin_files] + [f"--run_dir={scratch / 'run'}"]
    options = ["--workers=2", f"--launcher={launcher}", "--max_restarts=10"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist.launch", *options, "--", *worker],
        env=build_environment(**{STEPS_FILE: str(steps)}),
        cwd=HERE.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: list[tuple[float, str]] = []

    def listen() -> None:
        for line in process.stderr:
            if line.startswith("[launch] "):
                said.append((time.time(), line))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield process, said
    finally:
        process.kill()
        process.wait()
        listener.join()


def _is_second_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "tfdist.main" in process.cmdline()[:3] and process.environ().get("TFDIST_SLOT") == "1"
    return False


def _wait_for_step(process: subprocess.Popen[str], steps: Path, before: int) -> float:
    """The moment of the first step behind `before`."""
    _wait(process, lambda: _read_newest(steps) > before, f"step {before + 1}")
    return next(moment for moment, step in _read_lines(steps) if step > before)


def _wait(process: subprocess.Popen[str], has_come: object, what: str) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not has_come():
        if process.poll() is not None or time.monotonic() > give_up:
            sys.exit(f"{what} did not come; the launcher's status: {process.poll()}")
        time.sleep(0.01)


def _read_newest(steps: Path) -> int:
    return max((step for _, step in _read_lines(steps)), default=0)


def _read_lines(steps: Path) -> list[tuple[float, int]]:
    text = steps.read_text() if steps.exists() else ""
    pairs = [line.split() for line in text.split("\n")[:-1]]
    return [(float(moment), int(step)) for moment, step in pairs]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, has_quick=True)
