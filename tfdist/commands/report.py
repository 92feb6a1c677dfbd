"""`python -m tfdist.report RUN [RUN …]`: shows runs on a page, or those below a directory in the terminal.

Invariant: what a user did wrong ends with one message and exit status 2. TensorFlow is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfdist import command_line
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory

PROGRAM = "python -m tfdist.report"
COMPARISON = "report.html"
ABOUT = f"""\
{PROGRAM} RUN [RUN …] [FLAGS]
{PROGRAM} --list DIRECTORY

Writes RUN/report/index.html, a page that shows a run, at any moment of it; of several runs, one page that shows them
side by side. RUN is a run directory, local or gs://, of a training or a sweep.
"""
FLAGS = flags.FlagValues()
flags.DEFINE_string("output", None, f"the page of several runs; {COMPARISON} by default", flag_values=FLAGS)
flags.DEFINE_bool("watch", False, "draw again whenever a file has changed, until the runs are over", flag_values=FLAGS)
flags.DEFINE_bool("list", False, "print a table of the runs below a directory", flag_values=FLAGS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else arguments), trusts_the_disk=False)


def run(arguments: Sequence[str]) -> None:
    """Writes the page or prints the table that the arguments ask for."""
    given, run_dirs = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT)
    if not run_dirs:
        raise UserError(f"No run given. Write, for example: {PROGRAM} runs/digits")
    if given.list:
        _list(run_dirs)
    elif any(files.exists(RunDirectory(path).sweep) for path in run_dirs):
        _draw_sweep(run_dirs)
    else:
        _draw(run_dirs, given)


def _list(directories: Sequence[str]) -> None:
    from rich.console import Console

    from tfdist.report.listing import table_of
    from tfdist.telemetry.facts import now

    if len(directories) != 1:
        raise UserError(f"--list takes one directory; received {' '.join(directories)!r}.")
    Console().print(table_of(directories[0], now()))


def _draw_sweep(run_dirs: Sequence[str]) -> None:
    if len(run_dirs) > 1:
        raise UserError("A sweep has a page of its own. Give its directory alone, or those of trainings.")
    from tfdist.tuning.report.report import write_report

    print(write_report(run_dirs[0]))


def _draw(run_dirs: Sequence[str], given: flags.FlagValues) -> None:
    from tfdist.report import report
    from tfdist.report.run_data import Run, read_run

    if given.output and len(run_dirs) == 1:
        raise UserError(f"--output is for several runs; the page of one is in its directory. Received {run_dirs[0]!r}.")

    def write(runs: Sequence[Run]) -> str:
        if len(runs) == 1:
            return report.write_report(runs[0], is_live=given.watch)
        return report.write_comparison(runs, given.output or COMPARISON, is_live=given.watch)

    if given.watch:
        report.watch(run_dirs, lambda runs: print(write(runs), flush=True))
    else:
        print(write([read_run(path) for path in run_dirs]))
