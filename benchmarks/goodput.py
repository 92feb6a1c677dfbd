"""Goodput under kills: the share of an undisturbed run's steps that is left when the process is killed now and then.

Used by checkpoint.py. Time counts from the moment at which a process is about to build its model: starting Python and
importing TensorFlow takes the same for both, and as long as a tenth of the time between two kills here.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import HERE, Figure, choose_size

from tfdist.xla_cache import keep_compiled

_START_SECONDS = 120.0  # until a process builds its model, at most
_POLL_SECONDS = 0.02
LEAST_STEPS = choose_size(0, 1)  # without one there would be nothing to divide by


def goodput(
    *, mean_seconds: float, num_kills: int, alone_seconds: float, steps_per_epoch: int, goal: float
) -> list[Figure]:
    """tfdist's goodput, and the same ÷ that of `fit` with BackupAndRestore, under SIGKILL after the same random times.

    Args:
      mean_seconds: between kills, each of them between half and one and a half of it; tfdist is told.
      num_kills: the last one ends the measurement.
      alone_seconds: how long the undisturbed runs are; they are extrapolated from the speed of their second half.
      steps_per_epoch: after each of which BackupAndRestore saves.
      goal: of the ratio.
    """
    drawn = random.Random(1)
    lives = [mean_seconds * drawn.uniform(0.5, 1.5) for _ in range(num_kills)]
    shares = {who: _share(who, lives, alone_seconds, mean_seconds, steps_per_epoch) for who in ("tfdist", "keras")}
    ratio = shares["tfdist"] / shares["keras"] if shares["keras"] else float("inf")
    name = f"goodput, {num_kills} kills, one every {mean_seconds:g} s, epochs of {steps_per_epoch} steps"
    own = shares["tfdist"]
    return [
        Figure(f"{name}: tfdist ÷ BackupAndRestore", ratio, goal, (ratio, ratio), own, shares["keras"], "of steps"),
        Figure(f"{name}: tfdist ÷ undisturbed", own, 0.9, (own, own), own, 1.0, "of steps"),
    ]


class _NotResumableError(Exception):
    """A process ended by itself; with the end of what it printed."""


def _share(who: str, lives: list[float], alone_seconds: float, mean_seconds: float, steps_per_epoch: int) -> float:
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        half, whole = _life(who, scratch, [alone_seconds / 2, alone_seconds], 0, steps_per_epoch)
        rate = (whole - half) / (alone_seconds / 2)
        undisturbed = whole + rate * (sum(lives) - alone_seconds)
        done, lost = 0, 0
        for seconds in lives:
            try:
                (done,) = _life(who, scratch, [seconds], mean_seconds, steps_per_epoch)
            except _NotResumableError as error:  # then a user begins anew
                if not (Path(scratch) / "run").exists():
                    raise
                print(f"{who} ended by itself:\n{error}")
                lost += 1
                shutil.rmtree(Path(scratch) / "run")
                (done,) = _life(who, scratch, [seconds], mean_seconds, steps_per_epoch)
        told = f", {lost} times not resumable" if lost else ""
        print(f"{who}: {done:,} of {undisturbed:,.0f} steps in {sum(lives):.0f} s with {len(lives)} kills{told}")
        return done / undisturbed


def _life(who: str, scratch: str, seconds: list[float], mean_seconds: float, steps_per_epoch: int) -> list[int]:
    """The steps done after so many seconds; the process is killed after the last of them.

    Raises _NotResumableError when it ended before.
    """
    progress = Path(scratch) / "progress"
    progress.unlink(missing_ok=True)
    paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / "goodput_run.py"), who, str(Path(scratch) / "run"), str(progress)]
    environment = {**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if who == "tfdist":
        keep_compiled(str(Path(scratch) / "run"), environment)  # as tfdist.main does
    with open(Path(scratch) / "output", "w+") as output:
        process = subprocess.Popen(
            [*command, str(mean_seconds), str(steps_per_epoch)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            begun = _started_at(process, progress)
            done = []
            for moment in seconds:
                while (time.time() < begun + moment or _steps(progress) < LEAST_STEPS) and process.poll() is None:
                    time.sleep(_POLL_SECONDS)
                done.append(_steps(progress))
            if process.poll() is not None:
                output.seek(0)
                raise _NotResumableError(output.read()[-2000:])
            return done
        finally:
            process.kill()
            process.wait()


def _started_at(process: subprocess.Popen[bytes], progress: Path) -> float:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if progress.exists() and len(data := progress.read_bytes()) >= 8:
            return struct.unpack("d", data[:8])[0]
        time.sleep(_POLL_SECONDS)
    return time.time()


def _steps(progress: Path) -> int:
    data = progress.read_bytes() if progress.exists() else b""
    return struct.unpack("q", data[8:16])[0] if len(data) >= 16 else 0
