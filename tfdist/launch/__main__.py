"""`python -m tfdist.launch --workers=2 -- --gin_file=…`: the command on N processes of this machine.

Invariant: the exit status is that of the run: 0 when every worker ended with 0, else that of the worker whose failure
was the cause. Importing this module imports no TensorFlow.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tfdist.errors import EXIT_DONE, TfdistError, UserError, suggest
from tfdist.launch import horovod, local
from tfdist.launch.output import Output
from tfdist.launch.plan import Plan, worker_environment
from tfdist.launch.printing import command as printing
from tfdist.launch.supervision import ENDED_AS_ASKED, Outcome, Patience, describe, watch

LAUNCHERS = {"tf_config": local.start, "horovod": horovod.start}
USAGE = "python -m tfdist.launch --workers=N [options] -- ARGUMENTS OF tfdist.main"
EXAMPLE = "python -m tfdist.launch --workers=2 -- --gin_file=configs/experiments/digits.gin"
DESCRIPTION = f"""\
Runs `python -m tfdist.main ARGUMENTS` in N processes on this machine, as workers of one run.

  {EXAMPLE}

Each line that a worker writes has its name in front. The first failure ends all, and its exit status is the
command's. Ctrl-C, SIGTERM and SIGUSR1 are passed on to the workers, which save and end; a second Ctrl-C kills them.
Exit statuses are those of tfdist.main, 128 + N when a worker died of signal N, and 124 when the time was up.

With --print=slurm, kubernetes, tpu_vm or horovod nothing is run: what that scheduler runs is printed. Its options are
others: --print=slurm --help lists them.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    output = Output()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if printing.is_asked(arguments):
            print(printing.printed(arguments), end="", flush=True)
            return EXIT_DONE
        plan, launcher, patience = parse(arguments)
        signals = collect_signals()
        with LAUNCHERS[launcher](plan, output) as workers:
            outcome = watch(workers, signals=signals, say=output.say, patience=patience)
    except TfdistError as error:
        output.say(str(error))
        return error.exit_status
    report(outcome, output)
    return outcome.status


def parse(arguments: Sequence[str]) -> tuple[Plan, str, Patience]:
    """The plan, the launcher's name and the patience that the arguments ask for.

    Raises:
      UserError: they cannot be understood.
    """
    arguments = list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    ours, workers_own = arguments[:split], arguments[split + 1 :]
    options = _parse_options(ours)
    if not workers_own:
        what = "Nothing follows `--`" if "--" in arguments else "The `--` and tfdist.main's arguments are missing"
        raise UserError(f"{what}. Received: {' '.join(arguments)!r}. Write, for example: {EXAMPLE}")
    if sys.platform != "linux":
        raise UserError(f"tfdist.launch starts workers on Linux only; this is {sys.platform!r}.")
    plan = Plan(
        num_workers=options.workers,
        command=(sys.executable, "-m", options.module, *workers_own),
        environment=worker_environment(os.environ),
        pin_cpus=options.pin_cpus,
    )
    return plan, options.launcher, Patience(timeout_seconds=options.timeout_seconds)


def collect_signals() -> collections.deque[int]:
    """Has SIGINT, SIGTERM and SIGUSR1 (Slurm's warning) collected from now on, for `watch` to pass on."""
    signals: collections.deque[int] = collections.deque()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _frame: signals.append(received))
    return signals


def report(outcome: Outcome, output: Output) -> None:
    """Says at the very end, below what the others still wrote, whose failure it was."""
    if outcome.worker is None:
        return
    words = [] if outcome.status in ENDED_AS_ASKED else output.last_words(outcome.worker)
    quoted = ["  " + line for line in words]
    output.say(
        "\n".join([f"worker {outcome.worker} ended with {describe(outcome.status)}{':' * bool(words)}", *quoted])
    )


class _Parser(argparse.ArgumentParser):
    """Says what was wrong in a `UserError` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. Write, for example: {EXAMPLE}")


def _parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = suggest(
            unknown[0].split("=")[0], ("--workers", "--launcher", "--print", "--pin_cpus", "--timeout_seconds")
        )
        hint = near or f" The arguments of tfdist.main come after `--`: {EXAMPLE}"
        raise UserError(f"Unknown argument {unknown[0]!r}.{hint}")
    if options.workers is None:
        parser.error("--workers=N is missing: how many processes?")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tfdist.launch",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=_positive_integer, metavar="N", help="how many processes")
    add(
        "--launcher",
        choices=list(LAUNCHERS),
        default="tf_config",
        help="how they find each other: through TF_CONFIG (MultiWorkerMirroredStrategy; the default) or horovodrun",
    )
    add("--pin_cpus", action="store_true", help="give each worker its own share of the CPUs")
    add("--timeout_seconds", type=_positive_number, metavar="S", help="end the run after S seconds, with status 124")
    add("--module", default="tfdist.main", help=argparse.SUPPRESS)  # what to run in place of tfdist.main, for tests
    return parser


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1; received {text!r}")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0; received {text!r}")
    return number


if __name__ == "__main__":
    sys.exit(main())
