"""`--print=slurm`: a script for `sbatch` that runs one task a node, each a worker of the run.

How it ends decides what follows. Workers that were told to leave (Slurm's signal before the time limit, a preemption)
save and end with status 143, and the script puts itself back into the queue; a failure that may pass does so a number
of times; what the user has to mend, and a training that diverged, is never repeated.

Invariant: `srun` gives the workers `save_seconds` to end once the first has ended, and starts nothing that outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.command_line import define_checked, flags
from tfdist.launch.printing import checks
from tfdist.launch.printing.job import define_job, read_job
from tfdist.launch.printing.templates import fill


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    define_job(values, memory=checks.slurm_memory)
    define_checked("time", checks.slurm_time, "limit of one start, such as 24:00:00", values, required=True)
    for name in ("partition", "account", "qos"):
        define_checked(name, checks.word, f"sbatch's --{name}", values)
    features = checks.pattern(r"[A-Za-z0-9_.&|*\[\]()-]+", "features, such as a100&ib")
    define_checked("constraint", features, "sbatch's --constraint, such as a100&ib", values)
    define_checked("output", checks.path, "the log; NAME-%j.out without", values)
    lines = "a line of shell before the run, such as 'module load cuda'"
    flags.DEFINE_multi_string("setup", None, lines, flag_values=values)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    job = read_job(options, arguments)
    worker = [job.python, "-m", "tfdist.launch.slurm_worker"]
    worker += [] if job.module == "tfdist.main" else [f"--module={job.module}"]
    return fill("slurm.sh", options=options, job=job, worker=worker)
