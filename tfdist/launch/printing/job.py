"""What is to be run, whoever schedules it: the part of `--print`'s options that all schedulers share.

Invariant: a `Job` that exists names a gin file that exists (or lies in a bucket) and a run directory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from tfdist.command_line import define_checked, flags
from tfdist.errors import UserError
from tfdist.launch.printing import checks

DOCTOR = "tfdist.doctor"
DOCTORS_FLAGS = ("--gin_file", "--gin_param", "--run_dir")
REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run as a scheduler sees it.

    Attributes:
      name: names the job, and its workers' hosts where the scheduler gives them names.
      num_workers: processes, one a machine.
      restarts: how often a run that failed is started again; preemptions do not count.
      save_seconds: what a worker gets to save and end once it was told to.
      module: what each worker runs, tfdist.main or, to look at the machines before, tfdist.doctor.
      arguments: those of the module.
    """

    name: str
    num_workers: int
    gpus: int
    cpus: int | None
    memory: str | None
    python: str
    restarts: int
    save_seconds: int
    module: str
    arguments: tuple[str, ...]

    @property
    def run_dir(self) -> str:
        return values_of("--run_dir", self.arguments)[-1]

    @property
    def is_in_bucket(self) -> bool:
        return self.run_dir.startswith("gs://")

    @property
    def command(self) -> list[str]:
        return [self.python, "-m", self.module, *self.arguments]


def define_job(values: flags.FlagValues, *, memory: Callable[[str], str] | None = None) -> None:
    """Defines the flags of a Job; `memory` checks the scheduler's way to write an amount of it."""
    on: dict[str, Any] = {"flag_values": values}
    define_checked("name", checks.name, "of the job; that of the first gin file without", values)
    flags.DEFINE_integer("workers", 1, "how many, one a machine", lower_bound=1, upper_bound=9999, **on)
    flags.DEFINE_integer("gpus", 0, "for each worker", lower_bound=0, **on)
    flags.DEFINE_integer("cpus", None, "for each worker", lower_bound=1, **on)
    if memory is not None:
        define_checked("memory", memory, "for each worker", values)
    flags.DEFINE_bool("doctor", False, "have the machines examined (docs/clusters.md) in place of the training", **on)
    define_checked("python", checks.path, "the interpreter", values, default="python")
    flags.DEFINE_integer("restarts", 3, "after failures", lower_bound=0, **on)
    flags.DEFINE_integer("save_seconds", 120, "to save and end after a signal", lower_bound=1, **on)


def read_job(options: flags.FlagValues, arguments: Sequence[str]) -> Job:
    """The Job that the options and tfdist.main's arguments describe.

    Raises:
      UserError: the arguments name no gin file or run directory, or a file that does not exist.
    """
    gin_files = values_of("--gin_file", arguments)
    if not gin_files:
        raise UserError("No experiment given. Write -- --gin_file=configs/experiments/digits.gin --run_dir=…")
    for name in gin_files:
        if not name.startswith("gs://") and not any(os.path.isfile(os.path.join(p, name)) for p in ("", REPOSITORY)):
            raise UserError(f"There is no gin file {name!r} here, so the workers would not find it either.")
    if not values_of("--run_dir", arguments):
        raise UserError("No --run_dir given. Every worker must write into one place: add --run_dir=… behind `--`.")
    if not values_of("--run_dir", arguments)[-1].isprintable():
        raise UserError(
            f"--run_dir={values_of('--run_dir', arguments)[-1]!r} holds a character that cannot be printed."
        )
    name = options.name or name_from(gin_files[0])
    return Job(
        name=f"{name[:33]}-doctor" if options.doctor else name,
        num_workers=options.workers,
        gpus=options.gpus,
        cpus=options.cpus,
        memory=options.memory if "memory" in options else None,
        python=options.python,
        restarts=0 if options.doctor else options.restarts,
        save_seconds=options.save_seconds,
        module=DOCTOR if options.doctor else "tfdist.main",
        arguments=tuple(for_doctor(arguments) if options.doctor else arguments),
    )


def refuse(options: flags.FlagValues, *names: str, why: str) -> None:
    """Raises UserError where one of these flags is given."""
    for name in names:
        if options[name].present:
            raise UserError(f"{why}: leave --{name} out.")


def for_doctor(arguments: Sequence[str]) -> list[str]:
    """Those of tfdist.main's arguments that the doctor takes too."""
    return [f"{flag}={value}" for flag in DOCTORS_FLAGS for value in values_of(flag, arguments)]


def without(flag: str, arguments: Sequence[str]) -> list[str]:
    """The arguments without a flag, however it is written."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if not is_value and argument != flag and not argument.startswith(f"{flag}="):
            kept.append(argument)
        is_value = not is_value and argument == flag
    return kept


def values_of(flag: str, arguments: Sequence[str]) -> list[str]:
    """The values of a flag that is written as `--flag=value` or `--flag value`."""
    found = []
    for place, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            found.append(argument.partition("=")[2])
        elif argument == flag and place + 1 < len(arguments):
            found.append(arguments[place + 1])
    return [value for value in found if value]


def name_from(gin_file: str) -> str:
    """A job's name made of a gin file's."""
    stem = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(gin_file).stem.lower()).strip("-")[:40].strip("-")
    return stem if re.match(r"[a-z]", stem) else f"run-{stem}"[:40].strip("-")
