"""`python -m tfdist.launch.vertex_trial --metric=M --real=SETTING … -- ARGUMENTS`: one trial of a Vertex AI search.

Vertex AI puts `--SETTING=VALUE` behind a container's arguments; each becomes a `--gin_param`, the trial's number a
directory below `--run_dir`, and the metric of the finished training a line in the file that Vertex AI reads.

Invariant: a metric is reported once the training is done, and never otherwise. Imports no TensorFlow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tfdist import command_line
from tfdist.command_line import exit_status_of, flags, split_at_dashes
from tfdist.errors import UserError, suggest
from tfdist.launch.outcome import outcome
from tfdist.storage import files

# As the package cloudml-hypertune has them, and the line that it writes.
TRIAL = "CLOUD_ML_TRIAL_ID"
METRIC_FILE = "CLOUD_ML_HP_METRIC_FILE"
DEFAULT_METRIC_FILE = "/tmp/hypertune/output.metrics"

FLAGS = flags.FlagValues()
flags.DEFINE_string("metric", None, "to report", required=True, flag_values=FLAGS)
flags.DEFINE_multi_string("real", None, "a setting of the search, a number", flag_values=FLAGS)
flags.DEFINE_multi_string("whole", None, "the same, a whole number", flag_values=FLAGS)
flags.DEFINE_integer("max_restarts", 0, "as of tfdist.launch", flag_values=FLAGS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trial; returns the exit status of its training."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else arguments, os.environ))


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Trains and reports; raises UserError where this is no trial."""
    ours, workers_own = split_at_dashes(arguments)
    options = command_line.parse(FLAGS, ours, about=__doc__)
    if not environment.get(TRIAL):
        raise UserError(f"{TRIAL} is not set: this is no trial of Vertex AI. --print=vertex --search=… prints one.")
    trials_own, run_dir = trial_arguments(options, workers_own, environment[TRIAL])
    command = [sys.executable, "-m", "tfdist.launch", "--workers=1", f"--max_restarts={options.max_restarts}", "--"]
    with subprocess.Popen([*command, *trials_own]) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        status = process.wait()
    if status:
        return status
    metrics = outcome(run_dir)["result"]
    if options.metric not in metrics:
        hint = suggest(options.metric, metrics)
        raise UserError(f"The training has no metric {options.metric!r}; it has {', '.join(metrics)}.{hint}")
    line = {"timestamp": time.time(), "trial": environment[TRIAL], options.metric: str(metrics[options.metric])}
    path = environment.get(METRIC_FILE, DEFAULT_METRIC_FILE)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(json.dumps(line | {"global_step": "0", "checkpoint_path": ""}) + "\n")
    return 0


def trial_arguments(options: flags.FlagValues, arguments: Sequence[str], trial: str) -> tuple[list[str], str]:
    """Those of tfdist.main for a trial, and its run directory."""
    kept: list[str] = []
    run_dir = ""
    for argument in arguments:
        flag, _, value = argument.removeprefix("--").partition("=")
        if flag == "run_dir":
            run_dir = files.join(value, f"trial-{trial}")
        elif flag in options.whole:
            kept.append(f"--gin_param={flag} = {int(float(value))}")
        elif flag in options.real:
            kept.append(f"--gin_param={flag} = {float(value)!r}")
        else:
            kept.append(argument)
    if not run_dir:
        raise UserError("--run_dir=DIR is missing behind `--`.")
    return [*kept, f"--run_dir={run_dir}"], run_dir


if __name__ == "__main__":
    command_line.start(main)
