"""`--print=ray_slurm`: a script for `sbatch` that starts a Ray cluster on its nodes, and runs the command on it.

The cluster is this job's alone: a token made for it keeps others out, and it ends with the job. The command runs beside
the head, on the first node; how it ends decides what follows, as with `--print=slurm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.command_line import flags
from tfdist.launch.printing import on_ray, slurm
from tfdist.launch.printing.job import read_job
from tfdist.launch.printing.templates import fill


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    slurm.define_flags(values)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    job = read_job(options, arguments)
    return fill("ray_slurm.sh", options=options, job=job, driver=on_ray.driver(options, job))
