"""Draws a sweep: the objective over time, and the learning curves.

Invariant: a plot of a sweep without anything to show is a picture that says so. Trials that ended without an objective
are shown too. `report.py` asks for each plot as PNG; the parallel coordinates have a file of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tfdist.tuning.report.plot_style import (
    FAINT,
    INK,
    add_legend,
    as_it_is,
    color_map,
    label_axes,
    new_figure,
    objective_limits,
    png,
    say_instead,
)
from tfdist.tuning.schedule.history import Sweep, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vP*X"  # a shape for each rung beside its color
_TIME_UNITS = (("seconds", 1.0, 180.0), ("minutes", 60.0, 10800.0), ("hours", 3600.0, float("inf")))


def draw_objective(sweep: Sweep) -> bytes:
    """The objective at each end over the sweep's working time, and the best so far as a line."""
    figure, axes = new_figure(width=7.5, height=3.9)
    ends = sorted((end for trial in sweep.trials for end in trial.ends), key=lambda end: end.at_seconds)
    good = [end for end in ends if end.is_judged]
    if not good:
        say_instead(axes, "No trial has ended with an objective yet.")
        return png(figure)
    unit, scale, _ = next(each for each in _TIME_UNITS if max(sweep.seconds, good[-1].at_seconds) <= each[2])
    objectives = [end.objective for end in good if end.objective is not None]
    low, high = objective_limits(sweep, objectives)
    rungs = sorted({end.rung for end in good})
    for rung in rungs:
        times = [end.at_seconds / scale for end in good if end.rung == rung]
        heights = np.clip([end.objective for end in good if end.rung == rung], low, high)
        label = "trials" if len(rungs) == 1 else f"rung {rung}"
        axes.scatter(times, heights, s=26, label=label, zorder=3, **_rung_style(rung, rungs))
    best = np.maximum.accumulate(objectives) if sweep.direction == "max" else np.minimum.accumulate(objectives)
    times = [end.at_seconds / scale for end in good]
    axes.step(times, best, where="post", color=INK, linewidth=1.4, label="best so far", zorder=2)
    bad = [end.at_seconds / scale for end in ends if end.status in ("infeasible", "failed")]
    margin = 0.05 * (high - low)
    if bad:
        floor = np.full(len(bad), low - margin if sweep.direction == "max" else high + margin)
        axes.scatter(bad, floor, s=26, marker="x", color=FAINT, label="infeasible or failed", zorder=3)
    axes.set_ylim(low - 2 * margin, high + 2 * margin)
    axes.set_xlim(0, max(times[-1] * 1.03, 1e-3))
    label_axes(axes, x=f"{unit} since the start", y=sweep.objective)
    num_outliers = sum(not low <= value <= high for value in objectives)
    if num_outliers:
        text, y = f"{num_outliers} far worse, shown at the edge", 0.03 if sweep.direction == "max" else 0.95
        axes.text(0.99, y, text, color=FAINT, fontsize=8, ha="right", transform=axes.transAxes)
    add_legend(axes)
    return png(figure)


def draw_curves(sweep: Sweep) -> bytes:
    """The objective over the epochs, a line a trial, colored by the rung that the trial reached."""
    figure, axes = new_figure(width=7.5, height=4.1)
    drawn = sorted((trial for trial in sweep.trials if trial.curve), key=lambda trial: trial.curve[-1].rung)
    if not drawn:
        say_instead(axes, "No trial has reported an epoch yet.")
        return png(figure)
    reached = [trial.curve[-1].rung for trial in drawn]
    rungs = sorted(set(reached))
    low, high = objective_limits(sweep, [point.objective for trial in drawn for point in trial.curve])
    seen: set[int] = set()
    for trial, rung in zip(drawn, reached, strict=True):
        count = reached.count(rung)
        label = f"{'trials' if len(rungs) == 1 else f'rung {rung}'} ({count})"
        is_best = trial == sweep.best
        _draw_curve(axes, trial, rung, rungs, label=None if rung in seen else label, is_best=is_best)
        seen.add(rung)
    margin = 0.05 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_axes(axes, x="epoch", y=sweep.objective)
    add_legend(axes)
    return png(figure)


def _draw_curve(axes: Axes, trial: Trial, rung: int, rungs: list[int], *, label: str | None, is_best: bool) -> None:
    style = _rung_style(rung, rungs)
    epochs, objectives = [point.epoch for point in trial.curve], [point.objective for point in trial.curve]
    axes.plot(epochs, objectives, color=style["color"], linewidth=1.1, alpha=0.8, label=label, zorder=2 + rung)
    lone = [0] if len(epochs) == 1 else []
    axes.plot(epochs, objectives, "o", markevery=lone, markersize=4, color=style["color"])
    if is_best:
        axes.plot(epochs, objectives, color=INK, linewidth=2.2, label=as_it_is(f"best: {trial.name}"), zorder=100)


def _rung_style(rung: int, rungs: list[int]) -> dict[str, object]:
    place = rungs.index(rung)
    share = 0.7 if len(rungs) == 1 else place / (len(rungs) - 1)
    return {"color": color_map()(share), "marker": _MARKERS[place % len(_MARKERS)]}
