"""Writes the page of a run, or of several side by side, once or again and again while they go on.

Invariant: a page is replaced whole, so that a browser never reads half of one; Bokeh is imported when a page is first
drawn, TensorFlow never. The command `python -m tfdist.report` and the end of a training call it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

from tfdist.report.run_data import Run, read_run, versions
from tfdist.storage import files
from tfdist.telemetry.facts import now
from tfdist.telemetry.run_directory import RunDirectory

PAGE_NAME = "index.html"
POLL_SECONDS = 2.0
REFRESH_SECONDS = 10


def draw(run_dir: str) -> str | None:
    """Writes the page of a run; its path, or None where Bokeh is not installed."""
    if importlib.util.find_spec("bokeh") is None:
        return None
    return write_report(read_run(run_dir))


def write_report(run: Run, *, is_live: bool = False) -> str:
    """Writes RUN/report/index.html.

    Args:
      run: what to show.
      is_live: a browser then reads the page again and again, until the run is over.

    Returns:
      The path of the page.
    """
    from tfdist.report.page import run_page
    from tfdist.report.run_sections import notes_of, sections_of, summary_of

    moment = now()
    refresh = REFRESH_SECONDS if is_live and not run.is_over(moment) else None
    summary = summary_of(run, run.status(moment))
    text = run_page(run.name, summary, notes_of(run), sections_of(run), refresh_seconds=refresh)
    directory = RunDirectory(run.path).report
    files.make_dirs(directory)
    path = files.join(directory, PAGE_NAME)
    files.write_atomic(path, text)
    return path


def write_comparison(runs: Sequence[Run], path: str, *, is_live: bool = False) -> str:
    """Writes the page of several runs to `path`, which it returns."""
    from tfdist.report.comparison import comparison_sections
    from tfdist.report.page import run_page

    moment = now()
    refresh = REFRESH_SECONDS if is_live and not all(run.is_over(moment) for run in runs) else None
    sections = comparison_sections(runs, moment)
    files.write_atomic(path, run_page(f"{len(runs)} runs", [], [], sections, refresh_seconds=refresh))
    return path


def watch(run_dirs: Sequence[str], write: Callable[[Sequence[Run]], object]) -> None:
    """Calls `write` with the runs, and again whenever a file of theirs has changed, until all of them are over."""
    seen = None
    while True:
        found = [versions(run_dir) for run_dir in run_dirs]
        if found != seen:
            runs = [read_run(run_dir) for run_dir in run_dirs]
            write(runs)
            if all(run.is_over(now()) for run in runs):
                return
            seen = found
        time.sleep(POLL_SECONDS)
