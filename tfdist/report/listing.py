"""The runs below a directory, as a table for a terminal.

Invariant: a run that cannot be read is a line of the table as well. `python -m tfdist.report --list` prints it.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from tfdist.errors import UserError, printable
from tfdist.report.run_data import RunData, read_run
from tfdist.storage import files
from tfdist.telemetry.console.console_text import number_text
from tfdist.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    from rich.table import Table

MAX_METRICS = 3  # shown, an evaluation's first
WIDE = 120  # characters
STYLES = {"done": "green", "running": "cyan", "failed": "red", "unfinished": "yellow"}


def list_runs(directory: str, now: datetime.datetime, *, width: int) -> Table:
    """A line a run, the newest first; with less than `WIDE` characters each metric has its own.

    Raises:
      UserError: there is none in `directory` and below.
    """
    from rich.table import Table
    from rich.text import Text

    top = RunDirectory(directory).path
    runs, unread = [], []
    for path in _find_run_dirs(directory):
        try:
            runs.append(read_run(path))
        except UserError:  # a newer tfdist wrote it
            unread.append(path)
    runs.sort(key=lambda run: run.last_update or datetime.datetime.min.replace(tzinfo=datetime.UTC), reverse=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "status", "strategy"):
        table.add_column(name, overflow="fold")
    for name in ("steps", "goodput", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("metrics", no_wrap=True)
    for run in runs:
        status, goodput = run.status(now), run.goodput
        table.add_row(
            Text(printable(run.path.removeprefix(f"{top}/"))),
            Text(printable(status), STYLES.get(status, "")),
            Text(printable(str(run.fact("strategy") or ""))),
            f"{run.steps:,}",
            "" if goodput is None else f"{goodput:.0%}",
            "" if run.last_update is None else _age_text(now - run.last_update),
            Text(("  " if width >= WIDE else "\n").join(map(printable, _metric_texts(run)))),
        )
    for path in unread:
        table.add_row(Text(printable(path.removeprefix(f"{top}/"))), Text("unreadable", "red"))
    return table


def _find_run_dirs(directory: str) -> list[str]:
    """The run directories in `directory` and below, sorted; raises UserError where there is none."""
    top, name = RunDirectory(directory).path, RunDirectory("").starts
    if not files.is_dir(top):
        raise UserError(f"There is no directory {directory!r}. Write one that has run directories in it.")
    paths = [path for path in files.list_tree(top) if path == name or path.endswith(f"/{name}")]
    if not paths:
        raise UserError(f"There is no run in {directory!r} or below: no directory there has a {name}.")
    return sorted(files.join(top, path).removesuffix(f"/{name}") for path in paths)


def _metric_texts(run: RunData) -> list[str]:
    """`val_loss=0.1234`, `val_accuracy=0.9512`."""
    ordered = sorted(run.metrics, key=lambda name: not name.startswith("val_"))
    return [f"{name}={number_text(run.metrics[name])}" for name in ordered[:MAX_METRICS]]


def _age_text(age: datetime.timedelta) -> str:
    """`3 d`, `5 h`, `12 min`, `40 s`."""
    seconds = max(age.total_seconds(), 0.0)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
