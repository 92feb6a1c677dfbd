"""`--print=airflow`: a DAG for Airflow 3 whose tasks run the commands on Airflow's workers.

Invariant: a task that ends with a status that is final fails at once; only the training has retries.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.command_line import define_checked, flags
from tfdist.launch.printing import checks
from tfdist.launch.printing.job import define_job, read_job, refuse
from tfdist.launch.printing.pipelines.pipeline import define_steps, values_of_steps
from tfdist.launch.printing.templates import fill


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    define_job(values)
    where = "where the commands run on Airflow's workers; gin files and your own modules lie there"
    define_checked("working_dir", checks.path, where, values, required=True)
    define_steps(values)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    refuse(options, "gpus", "cpus", why="A task has what its Airflow worker has")
    values = values_of_steps(options, read_job(options, arguments))
    return fill("airflow.py", **values, environment=dict(options.env))
