"""`python -m tfdist.launch --print=SCHEDULER OPTIONS -- ARGUMENTS`: writes what the scheduler runs.

Invariant: what is printed is whole and checked; a user's mistake is a `UserError` and nothing is printed.

Imports no TensorFlow.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tfdist.command_line import Parser, split_at_dashes
from tfdist.errors import UserError, suggest
from tfdist.launch.printing import horovod, kubernetes, slurm, tpu_vm

SCHEDULERS = {"slurm": slurm, "kubernetes": kubernetes, "tpu_vm": tpu_vm, "horovod": horovod}
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
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--print", dest="scheduler", nargs="?", default="")
    scheduler, rest = first.parse_known_args(ours)
    if scheduler.scheduler not in SCHEDULERS:
        near = suggest(scheduler.scheduler or "", SCHEDULERS)
        raise UserError(
            f"--print is one of {', '.join(SCHEDULERS)}; received {scheduler.scheduler!r}.{near} "
            f"Write, for example: {EXAMPLE}"
        )
    module = SCHEDULERS[scheduler.scheduler]
    parser = Parser(
        prog=f"python -m tfdist.launch --print={scheduler.scheduler}",
        usage="%(prog)s OPTIONS -- ARGUMENTS OF tfdist.main",
    )
    module.add_arguments(parser)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        known = parser.shown_options
        near = suggest(unknown[0].split("=")[0], known)
        hint = near or f" It takes {', '.join(known)}; tfdist.main's arguments come after `--`."
        raise UserError(f"--print={scheduler.scheduler} has no option {unknown[0]!r}.{hint}")
    return module.render(options, workers_own)
