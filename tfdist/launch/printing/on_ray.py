"""What `--print=kuberay` and `--print=ray_slurm` run on the Ray cluster that they make: a training, or a sweep.

Invariant: each worker, or trial, asks Ray for what the options give a worker's machine.
"""

from __future__ import annotations

from tfdist.command_line import flags
from tfdist.errors import UserError
from tfdist.launch.printing.job import Job, values_of

SWEEP = "tune"


def driver(options: flags.FlagValues, job: Job) -> list[str]:
    """The command that is run once, beside the cluster's head.

    Raises:
      UserError: it would examine machines, which Ray's are not for.
    """
    if options.doctor:
        raise UserError("--doctor examines machines without Ray: print it for --print=slurm or --print=kubernetes.")
    if SWEEP in values_of("--mode", job.arguments):
        asked = f"cpus={job.cpus or 1}" + (f", gpus={job.gpus}" if job.gpus else "")
        given = ["from tfdist.tuning.places import executor", f"tune.executor = @executor.Ray({asked})"]
        given.append(f"tune.num_workers = {job.num_workers}")
        return [*job.command, *(f"--gin_param={statement}" for statement in given)]
    asked_for = [f"--cpus={job.cpus or 1}"] + ([f"--gpus={job.gpus}"] if job.gpus else [])
    launch = ["--launcher=ray", f"--workers={job.num_workers}", f"--max_restarts={job.restarts}", *asked_for]
    return [job.python, "-m", "tfdist.launch", *launch, "--placement=spread", "--", *job.arguments]
