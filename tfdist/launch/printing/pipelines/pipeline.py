"""The steps of a pipeline, whoever runs them: prepare, validate, train, evaluate, gate, export.

Each step is one command on one machine; a run directory that all of them see connects them. Only the training is worth
a retry: what fails in another step fails again.

Invariant: no command names a run directory, which is given when the pipeline runs.
"""

from __future__ import annotations

from typing import Any

from tfdist.command_line import define_checked, flags
from tfdist.errors import UserError
from tfdist.launch import outcome
from tfdist.launch.printing import checks
from tfdist.launch.printing.job import Job, refuse, values_of, without


def define_steps(values: flags.FlagValues) -> None:
    """Defines the flags of a pipeline's steps."""
    flags.DEFINE_string(
        "prepare", None, "a line of shell that prepares the data; no such step without", flag_values=values
    )
    outcome.define_conditions(values)
    define_checked("env", checks.variable, "NAME=VALUE, no secrets", values, repeats=True)


def values_of_steps(options: flags.FlagValues, job: Job) -> dict[str, Any]:
    """What the templates of pipelines use.

    Raises:
      UserError: the options ask for what a pipeline cannot do.
    """
    refuse(options, "workers", "doctor", "save_seconds", why="A step of a pipeline is one machine that trains")
    if values_of("--mode", job.arguments):
        raise UserError("A pipeline gives each of its steps a --mode: leave it out.")
    bounds = [(flag, *each) for flag in ("at_least", "at_most") for each in options[flag].value]
    if not bounds:
        raise UserError(
            "What must the evaluation reach before the export? Write --at_least=accuracy=0.95, or --at_most=…"
        )
    return {
        "options": options,
        "job": job,
        "tfdist": [job.python, "-m", job.module, *without("--run_dir", job.arguments)],
        "outcome": [job.python, "-m", outcome.__name__],
        "conditions": [f"--{flag}={metric}={bound!r}" for flag, metric, bound in bounds],
    }
