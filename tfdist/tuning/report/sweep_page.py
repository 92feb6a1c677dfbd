"""Writes what one sees of a sweep, at any moment of it: `trials.csv` and the page.

Invariant: only `sweep.jsonl` is read; each file is replaced whole; TensorFlow is not imported. The sweep calls
`write_sweep_report` at its end, and `python -m tfdist.report` whenever a user asks.
"""

from __future__ import annotations

import csv
import io
import math
import urllib.parse
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.report.page import Cell, Plot, Section, Table, build_page
from tfdist.report.report import check_can_draw, store_page
from tfdist.report.run_data import Curve
from tfdist.report.words import count_text, duration_text, short_names, value_text
from tfdist.storage import files
from tfdist.telemetry.console.console_text import number_text
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.schedule.history import Parameter, Sweep, Trial, read_sweep

MAX_CURVES = 100  # of the best trials


def write_sweep_report(run_dir: str) -> str:
    """Writes RUN_DIR/trials.csv and RUN_DIR/report/index.html; returns the path of the page.

    Args:
      run_dir: the run directory of a sweep, local or `gs://`; the sweep may be running.

    Raises:
      UserError: there is no sweep, or the extra `report` is not installed; trials.csv is written all the same then.
      OSError: the directory cannot be read or written.
    """
    sweep = read_sweep(run_dir)
    files.write_atomic(RunDirectory(run_dir).trials, format_csv(sweep))
    check_can_draw()
    count = sweep.num_unreadable_lines
    notes = [f"{count_text(count, 'line')} of sweep.jsonl could not be read and are missing here."] if count else []
    title = f"Sweep for the {'highest' if sweep.direction == 'max' else 'lowest'} {sweep.objective}"
    sections = [_best(sweep), *_plots(sweep), _trials(sweep, run_dir)]
    return store_page(run_dir, build_page(title, sections, summary=_summary(sweep), notes=notes))


def format_csv(sweep: Sweep) -> str:
    """A line a trial in the order they started, as RFC 4180 has it; empty where a trial has no such value."""
    paths = _paths(sweep)
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


def trial_address(run_dir: str, name: str) -> str:
    """Of a trial's run directory: from the page, or in Google's console where it is in a bucket."""
    if files.is_remote(run_dir):
        below = urllib.parse.quote(f"{run_dir.removeprefix('gs://').rstrip('/')}/trials/{name}")
        return f"https://console.cloud.google.com/storage/browser/{below}"
    return f"../trials/{urllib.parse.quote(name)}/"


def objective_limits(sweep: Sweep, values: Sequence[float]) -> tuple[float, float]:
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


def _paths(sweep: Sweep) -> list[str]:
    """The parameters of the space, then what models asked for beside them."""
    paths = [parameter.path for parameter in sweep.parameters]
    return list(dict.fromkeys([*paths, *(path for trial in sweep.trials for path in trial.values)]))


def _summary(sweep: Sweep) -> list[tuple[str, str]]:
    counts: dict[str, int] = {}
    for trial in sweep.trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    of = f" of {sweep.max_trials}" if sweep.max_trials is not None else ""
    facts = {
        "search": sweep.search,
        "state": "ended" if sweep.is_ended else "not ended",
        "trials": f"{len(sweep.trials)}{of}",
        "of these": ", ".join(f"{count} {status}" for status, count in counts.items()),
        "working time": duration_text(sweep.seconds),
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


def _plots(sweep: Sweep) -> list[Section]:
    """The objective over time, over each parameter's values, and over the epochs."""
    objectives = [trial.objective for trial in sweep.judged if trial.objective is not None]
    if not objectives:
        return [_learning_curves(sweep)]
    limits = objective_limits(sweep, objectives)
    return [_objective_over_time(sweep, limits), _objective_over_parameters(sweep, limits), _learning_curves(sweep)]


def _objective_over_time(sweep: Sweep, limits: tuple[float, float]) -> Section:
    from tfdist.report.figures import Axis, color_of, draw_curves

    ends = sorted((e for trial in sweep.trials for e in trial.ends if e.is_judged), key=lambda end: end.at_seconds)
    times, objectives = [end.at_seconds for end in ends], [end.objective or 0.0 for end in ends]
    best = (np.maximum if sweep.direction == "max" else np.minimum).accumulate(objectives)
    curve = {sweep.objective: Curve(np.array(times), best)}
    plot = draw_curves("Best so far", Axis("seconds"), curve, 1, y_range=limits)
    plot.figure.scatter(times, objectives, color=color_of(1), size=6)
    text = "Each end of a trial or of one of its rungs, over the sweep's working time."
    return Section(title="Objective", text=text, plots=[plot], is_wide=True)


def _objective_over_parameters(sweep: Sweep, limits: tuple[float, float]) -> Section:
    from tfdist.report.figures import color_of, draw_points

    names = short_names([parameter.path for parameter in sweep.parameters])
    rungs = sorted({trial.rung for trial in sweep.judged})
    legend = [(color_of(rung), f"rung {rung}") for rung in rungs] if len(rungs) > 1 else []
    plots = []
    for parameter in sweep.parameters:
        trials = [trial for trial in sweep.judged if parameter.path in trial.values]
        points = [(_position(parameter, t), t.objective or 0.0, color_of(t.rung), f"trial {t.name}") for t in trials]
        if points:
            figure = draw_points(points, y_range=limits, **_scale(parameter, trials))
            plots.append(Plot(title=names[parameter.path], figure=figure, legend=legend))
    return Section(title="Parameters", text=f"{sweep.objective} over each parameter, a point a trial.", plots=plots)


def _learning_curves(sweep: Sweep) -> Section:
    from tfdist.report.figures import Axis, draw_curves

    # The best is drawn last, above the others.
    trials = [*(trial for trial in sweep.trials if not trial.is_judged), *reversed(sweep.ranked)]
    curves: dict[str, Curve | None] = {
        trial.name: Curve(np.array([p.epoch for p in trial.curve]), np.array([p.objective for p in trial.curve]))
        for trial in [trial for trial in trials if trial.curve][-MAX_CURVES:]
    }
    if not curves:
        return Section(title="Learning curves")
    limits = objective_limits(sweep, [point.objective for trial in sweep.trials for point in trial.curve])
    plot = draw_curves(sweep.objective, Axis("epoch"), curves, len(curves), highlighted=[*curves][-1], y_range=limits)
    return Section(title="Learning curves", text="A line a trial, the best in color.", plots=[plot], is_wide=True)


def _scale(parameter: Parameter, trials: Sequence[Trial]) -> dict[str, Any]:
    """The axis of a parameter: choices by name, numbers in decades where they were drawn so."""
    if not parameter.is_number:
        choices = [value_text(value, most=24) for value in parameter.choices]
        return {"x_range": list(dict.fromkeys([*choices, *(_position(parameter, trial) for trial in trials)]))}
    return {"x_axis_type": "log" if parameter.is_logarithmic else "linear"}


def _position(parameter: Parameter, trial: Trial) -> Any:
    value = trial.values[parameter.path]
    return value if parameter.is_number and isinstance(value, int | float) else value_text(value, most=24)


def _trials(sweep: Sweep, run_dir: str) -> Section:
    if not sweep.trials:
        return Section(title="Trials")
    paths = [path for path in _paths(sweep) if any(path in trial.values for trial in sweep.trials)]
    names = short_names(paths)
    node = ["node"] * any(trial.host for trial in sweep.trials)
    heads = ["trial", "state", sweep.objective, "rung", "epochs", "seconds", *node, *(names[path] for path in paths)]
    rows = [
        [
            Cell(trial.name, link=trial_address(run_dir, trial.name), color="#2f9e62" if trial == sweep.best else ""),
            Cell(trial.status),
            Cell("" if trial.objective is None else number_text(trial.objective), trial.objective),
            Cell(str(trial.rung), trial.rung),
            Cell(str(trial.epochs), trial.epochs),
            Cell(f"{trial.seconds:.0f}", trial.seconds),
            *[Cell(trial.host or "")] * len(node),
            *(_value_cell(trial, path) for path in paths),
            Cell(trial.message),
        ]
        for trial in [*sweep.ranked, *(trial for trial in sweep.trials if not trial.is_judged)]
    ]
    table = Table(title="Trials", names=[*heads, "message"], rows=rows)
    return Section(title="Trials", text="The best first; a trial's name opens its run directory.", tables=[table])


def _value_cell(trial: Trial, path: str) -> Cell:
    if path not in trial.values:
        return Cell("")
    value = trial.values[path]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return Cell(value_text(value, most=40), value if is_number else None)
