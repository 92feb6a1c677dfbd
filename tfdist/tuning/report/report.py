"""`python -m tfdist.tuning.report RUN_DIR`: writes what one sees of a sweep, at any moment of it.

Invariant: only `sweep.jsonl` is read; each file is replaced whole, so that a page open in a browser is never half
written; TensorFlow is not imported. The sweep calls `write_report` at its end and as often in between as it likes.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import sys
import threading
import urllib.parse
from collections.abc import Callable, Sequence

from tfdist import command_line
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.report.parallel_plot import draw_parallel
from tfdist.tuning.report.plots import draw_curves, draw_objective
from tfdist.tuning.report.report_page import Picture, build_page
from tfdist.tuning.schedule.history import Sweep, read_sweep

PAGE_NAME = "index.html"
PROGRAM = "python -m tfdist.tuning.report"
ABOUT = f"""\
{PROGRAM} RUN_DIR

Writes trials.csv and report/ of a sweep again, also of one that is running or was killed. RUN_DIR is the run directory
of --mode=tune, local or gs://.
"""


def import_ahead() -> threading.Thread:
    """Imports what `write_report` needs, on a thread; to be joined before the interpreter ends."""

    def work() -> None:
        for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
            with contextlib.suppress(ImportError):  # write_report says so
                importlib.import_module(name)

    thread = threading.Thread(target=work, name="tfdist-report", daemon=True)
    thread.start()
    return thread


def write_report(run_dir: str) -> str:
    """Writes RUN_DIR/trials.csv and RUN_DIR/report/ with three PNGs and the page; some seconds of one core.

    Args:
      run_dir: the run directory of a sweep, local or `gs://`; the sweep may be running.

    Returns:
      The path of the page.

    Raises:
      UserError: there is no sweep, or the extra `tuner` is not installed; trials.csv is written all the same then.
      OSError: the directory cannot be read or written.
    """
    place = RunDirectory(run_dir)
    sweep = read_sweep(run_dir)
    files.write_atomic(place.trials, trials_csv(sweep))
    plots: dict[str, tuple[str, str, Callable[[Sweep], bytes]]] = {
        "objective.png": (
            "Objective over time",
            "Each end of a trial or of one of its rungs; the line is the best so far. Pauses are left out.",
            draw_objective,
        ),
        "parallel.png": (
            "Parameters",
            "A line a trial through its values to its objective; the thick one is the best, dotted ones have none.",
            draw_parallel,
        ),
        "curves.png": (
            "Learning curves",
            "A line a trial, in the color of the last rung it reported from.",
            draw_curves,
        ),
    }
    files.make_dirs(place.report)
    pictures = []
    for name, (title, text, draw) in plots.items():
        picture = Picture(name=name, title=title, text=text, png=draw(sweep))
        files.write_atomic(files.join(place.report, name), picture.png)
        pictures.append(picture)
    page = files.join(place.report, PAGE_NAME)
    files.write_atomic(page, build_page(sweep, pictures, link=lambda name: trial_address(run_dir, name)))
    return page


def trial_address(run_dir: str, name: str) -> str:
    """Of a trial's run directory: from the page, or in Google's console where it is in a bucket."""
    if files.is_remote(run_dir):
        below = urllib.parse.quote(f"{run_dir.removeprefix('gs://').rstrip('/')}/trials/{name}")
        return f"https://console.cloud.google.com/storage/browser/{below}"
    return f"../trials/{urllib.parse.quote(name)}/"


def trials_csv(sweep: Sweep) -> str:
    """A line a trial in the order they started, as RFC 4180 has it; empty where a trial has no such value."""
    paths = list({parameter.path: None for parameter in sweep.parameters})
    paths += list({path: None for trial in sweep.trials for path in trial.values if path not in paths})
    text = io.StringIO()
    writer = csv.writer(text)
    node = ["node"] * any(trial.host for trial in sweep.trials)
    writer.writerow(["trial", "status", "objective", "rung", "epochs", "seconds", *node, *paths, "message"])
    for trial in sweep.trials:
        objective = "" if trial.objective is None else repr(trial.objective)
        values = [trial.values.get(path, "") for path in paths]
        figures = [objective, trial.rung, trial.epochs, trial.seconds, *([trial.host or ""] if node else [])]
        writer.writerow([trial.name, trial.status, *figures, *values, trial.message])
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else arguments), trusts_the_disk=False)


def run(arguments: Sequence[str]) -> None:
    """Writes the report of the directory that the arguments name, and says where it is."""
    _, others = command_line.parse_with_operands(flags.FlagValues(), arguments, about=ABOUT)
    if len(others) != 1:
        raise UserError(f"One RUN_DIR is wanted; received {' '.join(others)!r}. Write: {PROGRAM} runs/sweep")
    print(write_report(others[0]))
