"""`python -m tfdist.launch.outcome --run_dir=DIR [--at_least=accuracy=0.9]`: what a run came to, for pipelines.

Prints one JSON object: `model`, the exported model's path; `result`, the metrics that the training ended with;
`evaluation`, those of the last `--mode=evaluate`. With conditions it is the gate between evaluation and export.

Invariant: an evaluation that does not meet every condition, or lacks a metric of one, ends with one message and status
2, which is worth no retry. Imports no TensorFlow.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import command_line
from tfdist.command_line import define_checked, exit_status_of, flags
from tfdist.errors import UserError, suggest
from tfdist.telemetry.records import load_record
from tfdist.telemetry.result import TRAIN, read_mode, read_result
from tfdist.telemetry.run_directory import RunDirectory


def condition(text: str) -> tuple[str, float]:
    """METRIC=NUMBER."""
    metric, equals, bound = text.rpartition("=")
    try:
        number = float(bound)
    except ValueError:
        number = math.nan
    if not metric or not equals or not math.isfinite(number):
        raise ValueError(f"must be METRIC=NUMBER, such as accuracy=0.95; received {text!r}")
    return metric, number


def define_conditions(values: flags.FlagValues) -> None:
    """Defines the flags of a gate."""
    define_checked("at_least", condition, "METRIC=NUMBER that the evaluation has to reach", values, repeats=True)
    define_checked("at_most", condition, "METRIC=NUMBER that the evaluation must not exceed", values, repeats=True)


FLAGS = flags.FlagValues()
flags.DEFINE_string("run_dir", None, "of a training, local or gs://", required=True, flag_values=FLAGS)
define_conditions(FLAGS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the outcome; returns the exit status."""
    return exit_status_of(lambda: _tell(sys.argv[1:] if arguments is None else arguments))


def outcome(run_dir: str) -> dict[str, Any]:
    """What a finished training came to.

    Raises:
      UserError: there is none in `run_dir`.
    """
    run = RunDirectory(run_dir)
    result = read_result(run) if read_mode(run) == TRAIN else None
    if result is None:
        raise UserError(f"{run.result} holds no result of a training. Let the training end first.")
    evaluation = load_record(run.evaluation, dict[str, Any]) or {}
    return {
        "model": run.model,
        "result": _numbers(result.eval_metrics or result.train_metrics),
        "evaluation": _numbers(evaluation),
    }


def _tell(arguments: Sequence[str]) -> None:
    options = command_line.parse(FLAGS, arguments, about=__doc__)
    found = outcome(options.run_dir)
    metrics = found["evaluation"]
    for flag, meets in (("at_least", float.__ge__), ("at_most", float.__le__)):
        for metric, bound in options[flag].value:
            value = metrics.get(metric)
            if value is None:
                hint = suggest(metric, metrics) or f" It has: {', '.join(metrics) or 'none'}."
                raise UserError(f"The evaluation of {options.run_dir} has no metric {metric!r}.{hint}")
            if not meets(value, bound):
                raise UserError(f"{metric} is {value:g}, and --{flag}={metric}={bound:g} is asked for.")
    print(json.dumps(found), flush=True)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    command_line.start(main)
