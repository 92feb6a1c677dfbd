"""`tfdist report RUN [RUN …]`: shows runs on a page, or those below a directory in the terminal.

Invariant: what a user did wrong ends with one message and exit status 2. TensorFlow is not imported.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from tfdist import command_line
from tfdist.command_line import flags
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory

PROGRAM = "tfdist report"
COMPARISON = "report.html"
ABOUT = f"""\
{PROGRAM} RUN [RUN …] [FLAGS]
{PROGRAM} --list DIRECTORY

Writes RUN/report/index.html, a page that shows a run, at any moment of it; of several runs, one page that shows them
side by side. RUN is a run directory, local or gs://, of a training or a sweep, whose trials.csv is written, too.
"""
FLAGS = flags.FlagValues()
flags.DEFINE_string("output", None, f"file for the page alone; {COMPARISON} for several runs", flag_values=FLAGS)
flags.DEFINE_bool("list", False, "print a table of the runs below a directory", flag_values=FLAGS)


def run(arguments: Sequence[str]) -> None:
    """Writes the page or prints the table that the arguments ask for."""
    given, run_dirs = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT)
    if not run_dirs:
        raise UserError(f"No run given. Write, for example: {PROGRAM} runs/digits")
    if not given.list:
        if files.is_dir(given.output or ""):
            raise UserError(
                f"--output={given.output} is a directory. Write a file: {files.join(given.output, COMPARISON)}"
            )
        try:
            print(_write(run_dirs, given.output or None))
        except OSError as error:
            if given.output or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            why = f"{error.filename!r} cannot be used: {error.strerror}."
            raise UserError(f"{why} To write the page alone, elsewhere, add --output={COMPARISON}") from error
        return
    from tfdist.report.listing import list_runs
    from tfdist.telemetry.facts import now

    if len(run_dirs) != 1:
        raise UserError(f"--list takes one directory; received {' '.join(run_dirs)!r}.")
    print(list_runs(run_dirs[0], now()))


def _write(run_dirs: Sequence[str], output: str | None) -> str:
    """Writes the page of a sweep, a run or several; returns its path."""
    from tfdist.report import write_pages

    is_sweep = any(files.exists(RunDirectory(path).sweep) for path in run_dirs)
    if len(run_dirs) > 1:
        if is_sweep:
            raise UserError("A sweep has a page of its own. Give its directory alone, or those of trainings.")
        return write_pages.write_comparison(run_dirs, output or COMPARISON)
    if is_sweep:
        from tfdist.tuning.report.sweep_page import write_sweep_report

        return write_sweep_report(run_dirs[0], output)
    return write_pages.write_run_page(run_dirs[0], output)
