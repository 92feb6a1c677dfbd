"""Writes the page of a run, or of several side by side.

Invariant: a page is replaced whole, so that a browser never reads half of one; Bokeh is imported when a page is first
drawn, TensorFlow never. The command `tfdist report` and the end of a training call it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from tfdist.errors import check_package
from tfdist.report.run_data import read_run
from tfdist.storage import files
from tfdist.telemetry.facts import now
from tfdist.telemetry.run_directory import RunDirectory


def can_draw() -> bool:
    """Whether Bokeh is installed."""
    return importlib.util.find_spec("bokeh") is not None


def check_can_draw() -> None:
    """Raises UserError where Bokeh is not installed."""
    check_package("bokeh", "bokeh", "report", "The page of a run or of a sweep")


def write_run_page(run_dir: str, path: str | None = None) -> str:
    """Writes the page of a run to `path`, by default RUN/report/index.html; returns its path."""
    check_can_draw()
    from tfdist.report.page import build_page
    from tfdist.report.run_page import build_sections, list_notes, summarize_run

    run = read_run(run_dir)
    name = run.path.rstrip("/").rpartition("/")[2] or run.path
    summary = summarize_run(run, run.status(now()))
    page = build_page(name, build_sections(run), summary=summary, notes=list_notes(run))
    return store_page(path or RunDirectory(run.path).report, page)


def store_page(path: str, page: str) -> str:
    """Writes a page, and makes the directory that it is in; returns its path."""
    files.make_dirs(os.path.dirname(path))
    files.write_atomic(path, page)
    return path


def write_comparison(run_dirs: Sequence[str], path: str) -> str:
    """Writes the page of several runs to `path`, which it returns."""
    check_can_draw()
    from tfdist.report.comparison import build_comparison
    from tfdist.report.page import build_page

    sections = build_comparison([read_run(run_dir) for run_dir in run_dirs], now())
    return store_page(path, build_page(f"{len(run_dirs)} runs", sections))
