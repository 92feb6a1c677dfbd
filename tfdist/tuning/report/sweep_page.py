"""Writes what one sees of a sweep, at any moment of it: `trials.csv` and the page.

Invariant: only `sweep.jsonl` is read; each file is replaced whole; TensorFlow is not imported. The sweep calls
`write_sweep_report` at its end, and `tfdist report` whenever a user asks.
"""

from __future__ import annotations

import collections
import csv
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.report.page import Cell, PageTable, Plot, Section, build_page
from tfdist.report.run_data import Curve
from tfdist.report.write_pages import check_can_draw, store_page
from tfdist.storage import files
from tfdist.telemetry.console.console_text import count_text, duration_text, number_text, short_names, value_text
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.schedule.journal import Sweep, Trial, read_sweep

MAX_CURVES = 100  # of the best trials


def write_sweep_report(run_dir: str, path: str | None = None) -> str:
    """Writes RUN_DIR/trials.csv and RUN_DIR/report/index.html; returns the path of the page.

    Args:
      run_dir: the run directory of a sweep, local or `gs://`; the sweep may be running.
      path: where to write the page instead, and nothing into the run directory.

    Raises:
      UserError: there is no sweep, or the extra `report` is not installed; trials.csv is written all the same then.
      OSError: the directory cannot be read or written.
    """
    sweep = read_sweep(run_dir)
    if path is None:
        files.write_atomic(RunDirectory(run_dir).trials, format_csv(sweep))
    check_can_draw()
    count = sweep.num_unreadable_lines
    notes = [f"{count_text(count, 'line')} of sweep.jsonl could not be read and are missing here."] if count else []
    title = f"Sweep for the {'highest' if sweep.direction == 'max' else 'lowest'} {sweep.objective}"
    path, trials = path or RunDirectory(run_dir).report, files.join(RunDirectory(run_dir).path, "trials")
    is_local = not files.is_remote(trials) and not files.is_remote(path)
    link = os.path.relpath(trials, os.path.dirname(path)) if is_local else ""
    sections = [_best(sweep), _objectives(sweep), _parameters(sweep), _learning_curves(sweep), _trials(sweep, link)]
    return store_page(path, build_page(title, sections, summary=_summary(sweep), notes=notes))


def format_csv(sweep: Sweep) -> str:
    """A line a trial in the order they started, as RFC 4180 has it; empty where a trial has no such value."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*_COLUMNS, *_paths(sweep), "message"])
    writer.writerows([*_figures(trial), *_values(sweep, trial), trial.message] for trial in sweep.trials)
    return text.getvalue()


_COLUMNS = ("trial", "status", "objective", "rung", "epochs", "seconds", "node")


def _figures(trial: Trial) -> list[Any]:
    objective = "" if trial.objective is None else trial.objective
    return [trial.name, trial.status, objective, trial.rung, trial.epochs, trial.seconds, trial.host or ""]


def _values(sweep: Sweep, trial: Trial) -> list[Any]:
    return [trial.values.get(path, "") for path in _paths(sweep)]


def _paths(sweep: Sweep) -> list[str]:
    """The parameters of the space, then what models asked for beside them."""
    return list(dict.fromkeys([*sweep.space, *(path for trial in sweep.trials for path in trial.values)]))


def _summary(sweep: Sweep) -> list[tuple[str, str]]:
    counts = collections.Counter(trial.status for trial in sweep.trials)
    of = f" of {sweep.max_trials}" if sweep.max_trials is not None else ""
    facts = {
        "search": sweep.search,
        "state": "ended" if sweep.is_ended else "not ended",
        "trials": f"{len(sweep.trials)}{of}",
        "of these": ", ".join(f"{count} {status}" for status, count in counts.items()),
        "wall clock": duration_text(sweep.seconds),
        "started": sweep.started[:16].replace("T", " "),
    }
    return [(name, text) for name, text in facts.items() if text]


def _best(sweep: Sweep) -> Section:
    best = sweep.best
    if best is None:
        return Section(title="Best trial", facts=[(sweep.objective, "No trial has ended with an objective yet.")])
    names = short_names(list(best.values))
    facts = [("trial", best.name), (sweep.objective, number_text(best.objective or 0.0)), ("epochs", str(best.epochs))]
    facts += [(names[path], value_text(value)) for path, value in best.values.items()]
    return Section(title="Best trial", facts=facts)


def _objectives(sweep: Sweep) -> Section:
    """The objective over time."""
    from tfdist.report.figures import Axis, choose_color, draw_curves

    ends = [end for trial in sweep.trials if trial.has_result for end in trial.ends if end.objective is not None]
    if not ends:
        return Section(title="Objective")
    ends.sort(key=lambda end: end.at_seconds)
    times, objectives = [end.at_seconds for end in ends], [end.objective or 0.0 for end in ends]
    best = (np.maximum if sweep.direction == "max" else np.minimum).accumulate(objectives)
    curve = {sweep.objective: Curve(np.array(times), best)}
    plot = draw_curves("Best so far", Axis("seconds"), curve, y_range=find_limits(sweep, objectives))
    plot.figure.scatter(times, objectives, color=choose_color(1), size=6)
    text = "Each end of a trial or of one of its rungs, by how long the sweep had run."
    return Section(title="Objective", text=text, plots=[plot], is_wide=True)


def _parameters(sweep: Sweep) -> Section:
    """The objective over each parameter; a point's color is its trial's rung."""
    from tfdist.report.figures import choose_color, draw_points

    names = short_names(list(sweep.space))
    rungs = sorted({trial.rung for trial in sweep.ranking})
    legend = [(choose_color(rung), f"rung {rung}") for rung in rungs] if len(rungs) > 1 else []
    plots = []
    for path, about in sweep.space.items():
        trials = [trial for trial in sweep.ranking if path in trial.values]
        if not trials:
            continue
        values = [trial.values[path] for trial in trials]
        scale: dict[str, Any] = {"x_axis_type": "log" if about.get("sampling") == "log" else "linear"}
        if "low" not in about:  # choices, by name
            labels = _label_choices([*about.get("values", ()), *values])
            values = [labels[repr(value)] for value in values]
            scale = {"x_range": list(dict.fromkeys(labels.values()))}
        objectives = [trial.objective or 0.0 for trial in trials]
        colors, texts = [choose_color(t.rung) for t in trials], [f"trial {t.name}" for t in trials]
        points = list(zip(values, objectives, colors, texts, strict=True))
        figure = draw_points(points, y_range=find_limits(sweep, objectives), **scale)
        plots.append(Plot(title=names[path], figure=figure, legend=legend))
    return Section(title="Parameters", text=f"{sweep.objective} over each parameter, a point a trial.", plots=plots)


def _label_choices(values: Sequence[Any]) -> dict[str, str]:
    """A text for the `repr` of each value: a short one, or itself where others have the same short one."""
    texts = {repr(value): value_text(value, most=24) for value in values}
    counts = collections.Counter(texts.values())
    return {exact: text if counts[text] == 1 else exact for exact, text in texts.items()}


def _learning_curves(sweep: Sweep) -> Section:
    from tfdist.report.figures import Axis, draw_curves

    # The best is drawn last, above the others.
    trials = [*(trial for trial in sweep.trials if not trial.has_result), *reversed(sweep.ranking)]
    curves: dict[str, Curve | None] = {
        trial.name: Curve(np.array([p.epoch for p in trial.curve]), np.array([p.objective for p in trial.curve]))
        for trial in [trial for trial in trials if trial.curve][-MAX_CURVES:]
    }
    if not curves:
        return Section(title="Learning curves")
    limits = find_limits(sweep, [point.objective for trial in trials for point in trial.curve])
    plot = draw_curves(sweep.objective, Axis("epoch"), curves, highlighted=[*curves][-1], y_range=limits)
    return Section(title="Learning curves", text="A line a trial, the best in color.", plots=[plot], is_wide=True)


def find_limits(sweep: Sweep, values: Sequence[float]) -> tuple[float, float]:
    """The range of `values` to show, the lowest first: all of them, but for outliers on the worse side.

    A value is one when it lies further than 1.5 times the middle half's width beyond that half (Tukey, "Exploratory
    Data Analysis", 1977): one diverged trial would press all others into a line.
    """
    low, high = min(values), max(values)
    first, third = np.percentile(values, [25, 75])
    reach = 1.5 * (third - first)
    if sweep.direction == "max":
        low = max(low, first - reach)
    else:
        high = min(high, third + reach)
    margin = 0.05 * (high - low) or abs(low) * 0.05 or 0.5
    return float(low - margin), float(high + margin)


def _trials(sweep: Sweep, directory: str) -> Section:
    """A table, the best trial first, with links into their directory; columns that no trial fills are left out."""
    names = short_names(_paths(sweep))
    heads = [*_COLUMNS[:2], sweep.objective, *_COLUMNS[3:], *names.values(), "message"]
    trials = [*sweep.ranking, *(trial for trial in sweep.trials if not trial.has_result)]
    rows = [[*map(_cell, [*_figures(trial), *_values(sweep, trial)]), Cell(trial.message)] for trial in trials]
    for trial, row in zip(trials, rows, strict=True):
        link = f"{directory}/{trial.name}/" if directory else ""
        row[0] = Cell(trial.name, link=link, color="#2f9e62" if trial == sweep.best else "")
    shown = [column for column in range(len(heads)) if any(row[column].text for row in rows)]
    table = PageTable(
        title="Trials",
        names=[heads[column] for column in shown],
        rows=[[row[column] for column in shown] for row in rows],
    )
    text = "The best first; a trial's name opens its run directory."
    return Section(title="Trials", text=text, tables=[table] if rows else [])


def _cell(value: Any) -> Cell:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(value_text(value, most=40), value if is_number else None)
