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
from pathlib import Path

from measuring import HERE, Figure, interleaved, ratio, report

ROUNDS, QUICK_ROUNDS = 11, 3
GOAL = 0.9
STEP_FILE = "TFDIST_BENCHMARK_STEP"  # in the environment: where to tell of the first step


def measure(_: object = None, *, quick: bool) -> list[Figure]:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        peer = functools.partial(_seconds, scratch, [sys.executable, str(HERE / "start_steps.py")])
        killed = f"{scratch}/killed"
        _seconds(scratch, _command(killed), "45")
        begun = [0]

        def anew() -> float:
            begun[0] += 1
            return _seconds(scratch, _command(f"{scratch}/{begun[0]}"))

        samples = interleaved([anew, functools.partial(_seconds, scratch, _command(killed)), peer], rounds)
    told = {"unit": "s", "at_most": True}
    return [
        ratio("from the command to the first step ÷ a plain Keras script", samples[0], samples[2], GOAL, **told),
        ratio("… of a run that was killed, from its checkpoint", samples[1], samples[2], GOAL, **told),
    ]


def _command(run_dir: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.main", "--gin_file=benchmarks/start.gin", f"--run_dir={run_dir}"]


def _seconds(scratch: str, command: list[str], steps: str = "1") -> float:
    """Until a process has done so many steps, after which it ends itself as a kill would."""
    path = Path(scratch) / "step"
    path.unlink(missing_ok=True)
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3", STEP_FILE: f"{steps} {path}"}
    started = time.time()
    subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, check=False)
    return float(path.read_text()) - started


if __name__ == "__main__":
    report(__doc__, measure, has_quick=True)
