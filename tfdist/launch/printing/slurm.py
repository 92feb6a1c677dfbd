"""`--print=slurm`: a script for `sbatch` that runs one task a node, each a worker of the run.

How it ends decides what follows. Workers that were told to leave (Slurm's signal before the time limit, a preemption)
save and end with status 143, and the script puts itself back into the queue; a failure that may pass does so a number
of times; what the user has to mend, and a training that diverged, is never repeated.

Invariant: `srun` gives the workers `save_seconds` to end once the first has ended, and starts nothing that outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.command_line import define_checked, flags
from tfdist.errors import EXIT_DIVERGED, EXIT_PREEMPTED, EXIT_USER_ERROR
from tfdist.launch.printing import checks
from tfdist.launch.printing.job import Job, define_job, read_job, shell

SCRIPT = """\
#!/bin/bash
# {title}
{directives}

set -uo pipefail
trap : TERM # a preemption's: the workers get it too, and this script has to see how they end
{setup}
# What was cancelled stays so, and a job that Slurm itself preempts goes back without this.
again() {{
    if scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
        echo "$1: back into the queue" >&2
        scontrol requeue "$SLURM_JOB_ID"
    fi
}}

hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)"
port="$((20000 + SLURM_JOB_ID % 10000))" # each job its own, below the ports that the kernel gives away

# The workers end by themselves when one of them does; whatever is left {save_seconds} s later hangs, and is ended.
srun --kill-on-bad-exit=0 --wait={save_seconds}{label} \\
    {worker}
status=$?

case $status in
    0) ;;
    {preempted}) again "told to leave, and saved" ;;
    {user_error} | {diverged}) # a mistake to mend, or the training diverged: again would be the same
        ;;
    *)
        if (("${{SLURM_RESTART_COUNT:-0}}" < {restarts})); then
            again "ended with status $status, restart $((${{SLURM_RESTART_COUNT:-0}} + 1))"
        fi
        ;;
esac
exit $status
"""


def define_flags(values: flags.FlagValues) -> None:
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
    job = read_job(options, arguments)
    worker = [job.python, "-m", "tfdist.launch.slurm_worker"]
    worker += [] if job.module == "tfdist.main" else [f"--module={job.module}"]
    return SCRIPT.format(
        title=f"sbatch FILE; {job.num_workers} worker{'s' * (job.num_workers > 1)}, run directory {job.run_dir}",
        directives="\n".join(f"#SBATCH {directive}" for directive in _directives(options, job)),
        setup="".join(f"{line}\n" for line in options.setup),
        worker=f'{shell(worker)} --hosts="$hosts" --port="$port" -- \\\n    {shell(job.arguments)}',
        save_seconds=job.save_seconds,
        label=" --label" if options.doctor else "",
        restarts=job.restarts,
        preempted=EXIT_PREEMPTED,
        user_error=EXIT_USER_ERROR,
        diverged=EXIT_DIVERGED,
    )


def _directives(options: flags.FlagValues, job: Job) -> list[str]:
    given = {name: getattr(options, name) for name in ("partition", "account", "qos", "constraint")}
    return [
        f"--job-name={job.name}",
        f"--nodes={job.num_workers}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"--cpus-per-task={job.cpus}"] if job.cpus else []),
        *([f"--mem={job.memory}"] if job.memory else []),
        f"--time={options.time}",
        f"--signal=USR1@{job.save_seconds}",  # to the tasks, not to this script: they save and end with 143
        "--requeue",
        "--open-mode=append",
        f"--output={options.output or f'{job.name}-%j.out'}",
        *[f"--{name}={value}" for name, value in given.items() if value],
    ]
