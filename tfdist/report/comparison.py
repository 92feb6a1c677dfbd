"""The sections of the page of several runs: a table of them, what differs between them, and their curves side by side.

Invariant: runs that differ in the seed alone are one row of the ablation table, with mean and spread. A setting counts
as different only where one of the runs states it: half a run has no list of its defaults.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence

import numpy as np

from tfdist.report.figures import STEPS, Axis, choose_color, draw_curves
from tfdist.report.page import Cell, PageTable, Section
from tfdist.report.run_data import RunData, is_metric
from tfdist.telemetry.console.console_text import duration_text, number_text, short_names

SEED = "train.seed"
FACTS = ("strategy", "num_replicas")  # which the same settings may leave to the machine
NOT_SET = "–"


def build_comparison(runs: Sequence[RunData], now: datetime.datetime) -> list[Section]:
    """The sections of the page of several runs, empty ones among them."""
    short, axis = short_names([run.path for run in runs], "/"), Axis(STEPS)
    names = [short[run.path] for run in runs]
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    keys = dict.fromkeys(key for run in runs for key in run.curves if is_metric(key[0]))
    by_name = dict(zip(names, runs, strict=True))
    curves = [
        draw_curves(f"{key[0]} ({key[1]})", axis, {name: run.curves.get(key) for name, run in by_name.items()})
        for key in keys
    ]
    return [
        Section(title="Runs", tables=[_runs_table(runs, names, metrics, now)]),
        _ablation(runs, metrics),
        Section(title="Curves", text="A line a run.", plots=curves),
    ]


def find_differing_settings(runs: Sequence[RunData]) -> list[str]:
    """The settings and facts that differ between the runs."""
    stated = dict.fromkeys(name for run in runs for name in (*FACTS, *run.stated))
    return [name for name in stated if len({_read_setting(run, name) for run in runs}) > 1]


def _read_setting(run: RunData, name: str) -> str | None:
    value = run.fact(name) if name in FACTS else run.settings.get(name)
    return None if value is None else str(value)


def _runs_table(
    runs: Sequence[RunData], names: Sequence[str], metrics: Sequence[str], now: datetime.datetime
) -> PageTable:
    rows = [
        [
            Cell(name, color=choose_color(index)),
            Cell(run.status(now)),
            Cell(str(run.fact("strategy") or "")),
            Cell(str(run.fact("num_replicas") or ""), run.fact("num_replicas")),
            Cell(f"{run.steps:,}", run.steps),
            *(_mean([run.metrics[metric]] if metric in run.metrics else []) for metric in metrics),
            Cell("" if run.goodput is None else f"{run.goodput:.1%}", run.goodput),
            Cell("" if run.wall_seconds is None else duration_text(run.wall_seconds), run.wall_seconds),
        ]
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    heads = ("run", "status", "strategy", "replicas", "steps", *metrics, "goodput", "wall clock")
    return PageTable(title="Runs", names=heads, rows=rows)


def _ablation(runs: Sequence[RunData], metrics: Sequence[str]) -> Section:
    differ = [name for name in find_differing_settings(runs) if name != SEED]
    groups: dict[tuple[str | None, ...], list[RunData]] = {}
    for run in runs:
        groups.setdefault(tuple(_read_setting(run, name) for name in differ), []).append(run)
    rows = [
        [
            *(Cell(NOT_SET if value is None else value) for value in values),
            Cell(str(len(group)), len(group)),
            *(_mean([run.metrics[metric] for run in group if metric in run.metrics]) for metric in metrics),
        ]
        for values, group in groups.items()
    ]
    short = short_names(differ)
    has_seeds = len({run.settings.get(SEED) for run in runs}) > 1
    text = "" if differ else "No setting differs, but for the seed." if has_seeds else "No setting differs."
    if len(groups) < len(runs):
        text += " Runs that differ in the seed at most are one row: mean ± standard deviation."
    if any(not run.result for run in runs):
        text += " Of runs that are not done the newest metrics count."
    table = PageTable(title="Ablation", names=(*(short[name] for name in differ), "runs", *metrics), rows=rows)
    return Section(title="What differs", text=text, tables=[table])


def _mean(values: Sequence[float]) -> Cell:
    """`0.9512 ± 0.0012`, of one value `0.9512`."""
    if not values:
        return Cell("")
    mean = statistics.fmean(values)
    spread = f" ± {number_text(float(np.std(values, ddof=1)))}" if len(values) > 1 else ""  # nan where one is
    return Cell(number_text(mean) + spread, mean)
