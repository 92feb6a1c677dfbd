"""The runs below a directory, as a table for a terminal.

Invariant: a run that cannot be read is a line of the table as well. `python -m tfdist.report --list` prints it.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.errors import UserError, printable
from tfdist.report.run_data import Run, read_run
from tfdist.storage import files
from tfdist.telemetry.console.console_text import number_text
from tfdist.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    from rich.table import Table

MOST_METRICS = 3  # shown, an evaluation's first
STYLES = {"done": "green", "running": "cyan", "failed": "red", "unfinished": "yellow"}


def run_dirs_below(directory: str) -> list[str]:
    """The run directories in `directory` and below, sorted; raises UserError where there is none."""
    place = RunDirectory(directory)
    if not files.is_dir(place.path):
        raise UserError(f"There is no directory {directory!r}. Write one that has run directories in it.")
    name = RunDirectory("").starts
    found = [path for path in files.list_tree(place.path) if path == name or path.endswith(f"/{name}")]
    if not found:
        raise UserError(f"There is no run in {directory!r} or below: no directory there has a {name}.")
    return sorted(files.join(place.path, path).removesuffix(f"/{name}") for path in found)


def table_of(directory: str, now: datetime.datetime) -> Table:
    """A line a run, the newest first."""
    from rich.table import Table
    from rich.text import Text

    runs, unread = [], []
    for path in run_dirs_below(directory):
        try:
            runs.append(read_run(path))
        except UserError:  # a newer tfdist wrote it
            unread.append(path)
    runs.sort(key=lambda run: run.last_word or datetime.datetime.min.replace(tzinfo=datetime.UTC), reverse=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "status", "strategy"):
        table.add_column(name, overflow="fold")
    for name in ("steps", "goodput", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("metrics", overflow="fold")
    for run in runs:
        status, goodput = run.status(now), run.goodput
        table.add_row(
            Text(printable(run.path.removeprefix(f"{RunDirectory(directory).path}/"))),
            Text(printable(status), STYLES.get(status, "")),
            Text(printable(str(run.fact("strategy") or ""))),
            f"{run.steps:,}",
            "" if goodput is None else f"{goodput:.0%}",
            "" if run.last_word is None else age_text(now - run.last_word),
            Text(printable(metrics_text(run))),
        )
    for path in unread:
        table.add_row(Text(printable(path.removeprefix(f"{RunDirectory(directory).path}/"))), Text("unreadable", "red"))
    return table


def metrics_text(run: Run) -> str:
    """`val_loss=0.1234  val_accuracy=0.9512`; no line ends between a name and its value."""
    ordered: Sequence[str] = sorted(run.metrics, key=lambda name: not name.startswith("val_"))
    return "  ".join(f"{name}={number_text(run.metrics[name])}" for name in ordered[:MOST_METRICS])


def age_text(age: datetime.timedelta) -> str:
    """`3 d`, `5 h`, `12 min`, `40 s`."""
    seconds = max(age.total_seconds(), 0.0)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
