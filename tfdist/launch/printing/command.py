"""`python -m tfdist.launch --print=SCHEDULER OPTIONS -- ARGUMENTS`: writes what the scheduler runs.

Invariant: what is printed is whole and checked; a user's mistake is a `UserError` and nothing is printed.

Imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist import command_line
from tfdist.command_line import flags, split_at_dashes
from tfdist.errors import UserError, suggest
from tfdist.launch.printing import horovod, kuberay, kubernetes, ray_slurm, slurm, tpu_vm
from tfdist.launch.printing.pipelines import airflow, kubeflow, vertex

SCHEDULERS = {
    "slurm": slurm,
    "kubernetes": kubernetes,
    "tpu_vm": tpu_vm,
    "horovod": horovod,
    "kuberay": kuberay,
    "ray_slurm": ray_slurm,
    "kfp": kubeflow,
    "vertex": vertex,
    "airflow": airflow,
}
EXAMPLE = (
    "python -m tfdist.launch --print=slurm --workers=2 --time=24:00:00 -- "
    "--gin_file=configs/experiments/digits.gin --run_dir=runs/digits"
)


def is_asked(arguments: Sequence[str]) -> bool:
    """Whether `--print` stands before the `--`."""
    ours, _ = split_at_dashes(arguments)
    return any(argument == "--print" or argument.startswith("--print=") for argument in ours)


def printed(arguments: Sequence[str]) -> str:
    """What the scheduler that `--print` names runs.

    Raises:
      UserError: the options or tfdist.main's arguments are wrong or do not fit together.
    """
    ours, workers_own = split_at_dashes(arguments)
    scheduler, rest = _scheduler(ours)
    if scheduler not in SCHEDULERS:
        near = suggest(scheduler or "", SCHEDULERS)
        raise UserError(
            f"--print is one of {', '.join(SCHEDULERS)}; received {scheduler!r}.{near} Write, for example: {EXAMPLE}"
        )
    module = SCHEDULERS[scheduler]
    values = flags.FlagValues()
    module.define_flags(values)
    about = f"python -m tfdist.launch --print={scheduler} [FLAGS] -- ARGUMENTS OF tfdist.main"
    hint = f"--print={scheduler} --help lists the flags; those of tfdist.main come after `--`."
    return module.render(command_line.parse(values, rest, about=about, hint=hint), workers_own)


def _scheduler(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """What --print names, and the other arguments."""
    values = flags.FlagValues()
    flags.DEFINE_string("print", None, "the scheduler", flag_values=values)
    values.set_gnu_getopt(True)
    try:
        others = values(["", *arguments], known_only=True)[1:]
    except flags.Error:  # nothing follows --print
        return None, []
    return values["print"].value, others
