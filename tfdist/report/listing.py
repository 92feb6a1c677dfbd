"""The runs below a directory, as a table for a terminal.

Invariant: a run that cannot be read is a line of the table as well. `tfdist report --list` prints it.
"""

from __future__ import annotations

import datetime

from tfdist.errors import UserError, printable
from tfdist.report.run_data import RunData, read_run
from tfdist.storage import files
from tfdist.telemetry.console.console_text import align_columns, number_text
from tfdist.telemetry.run_directory import RunDirectory

MAX_METRICS = 3  # shown, an evaluation's first
HEADS = ("run", "status", "strategy", "steps", "goodput", "age", "metrics")
NUMBERS = ("steps", "goodput", "age")


def list_runs(directory: str, now: datetime.datetime) -> str:
    """A line a run, the newest first.

    Raises:
      UserError: there is none in `directory` and below.
    """
    top = RunDirectory(directory).path
    runs, unread = [], []
    for path in _find_run_dirs(directory):
        try:
            runs.append(read_run(path))
        except UserError:  # a newer tfdist wrote it
            unread.append(path)
    runs.sort(key=lambda run: run.last_update or datetime.datetime.min.replace(tzinfo=datetime.UTC), reverse=True)
    rows: list[tuple[str, ...]] = [
        (
            run.path.removeprefix(f"{top}/"),
            run.status(now),
            str(run.fact("strategy") or ""),
            f"{run.steps:,}",
            "" if run.goodput is None else f"{run.goodput:.0%}",
            "" if run.last_update is None else _age_text(now - run.last_update),
            "  ".join(_metric_texts(run)),
        )
        for run in runs
    ]
    rows += [(path.removeprefix(f"{top}/"), "unreadable", "", "", "", "", "") for path in unread]
    return align_columns([HEADS, *(tuple(map(printable, row)) for row in rows)], NUMBERS)


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
