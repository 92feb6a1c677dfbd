"""Draws the parallel coordinates of a sweep: an axis a parameter, a line a trial, colored by the objective.

Invariant: an axis shows the whole range of its parameter, in decades where it was drawn so, and spells out choices;
what a trial did not have is its own place below the axis. Trials without an objective are dotted. `report.py` asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.report.words import short_names, shorten, value_text
from tfdist.tuning.report.plot_style import (
    BACKGROUND,
    FAINT,
    INK,
    as_it_is,
    color_map,
    new_figure,
    objective_limits,
    png,
    say_instead,
)
from tfdist.tuning.schedule.history import Parameter, Sweep, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABSENT = -0.12
_LONGEST_LABEL = 14


def draw_parallel(sweep: Sweep) -> bytes:
    """Lines from axis to axis; the last axis is the objective, in the colors of the lines."""
    figure, axes = new_figure(width=max(7.5, 1.5 + 1.1 * len(sweep.parameters)), height=4.4)
    if not sweep.parameters or not any(trial.values for trial in sweep.trials):
        reason = "No trial has started yet." if sweep.parameters else "The journal names no parameters."
        say_instead(axes, reason)
        return png(figure)
    objectives = [trial.objective for trial in sweep.judged if trial.objective is not None]
    limits = objective_limits(sweep, objectives) if objectives else None
    _draw_trials(axes, sweep, limits or (0.0, 1.0))
    names = short_names([parameter.path for parameter in sweep.parameters], least=2)
    for x, parameter in enumerate(sweep.parameters):
        axes.plot([x, x], [0, 1], color=FAINT, linewidth=1.2, zorder=3)
        _draw_ticks(axes, x, _ticks(parameter) + _absence(sweep, parameter))
    titles = [_wrap(names[parameter.path]) for parameter in sweep.parameters]
    if limits:
        _draw_objective_axis(axes, sweep, limits)
        titles.append(_wrap(sweep.objective))
    axes.set_xticks(range(len(titles)), [as_it_is(title) for title in titles])
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, labelsize=9)
    axes.set_yticks([])
    axes.set(xlim=(-0.45, len(titles) - 0.4), ylim=(-0.2, 1.04))
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return png(figure)


def _draw_trials(axes: Axes, sweep: Sweep, limits: tuple[float, float]) -> None:
    colors = color_map()
    ranked = sweep.ranked
    others = [trial for trial in sweep.trials if trial.values and not trial.is_judged]
    heights = _spread(sweep.parameters, [*ranked, *others])
    for trial in others:
        axes.plot(heights[trial.name], ":", color=FAINT, linewidth=0.9, alpha=0.8, zorder=1)
    for place, trial in enumerate(reversed(ranked)):
        share = _share(trial.objective or 0.0, limits)
        color = colors(share if sweep.direction == "max" else 1 - share)
        width = 2.8 if trial == sweep.best else 1.0
        axes.plot([*heights[trial.name], share], color=color, linewidth=width, alpha=0.9, zorder=2 + place / 1e4)


def unit_value(parameter: Parameter, value: Any) -> float:
    """The value's place from 0 to 1: along the axis of a number, in the middle of its part for one of n choices."""
    choices = parameter.choices
    if choices:
        index = choices.index(value) if value in choices else len(choices) - 1
        return (index + 0.5) / len(choices)
    low, high = parameter.low, parameter.high
    if low is None or high is None or not isinstance(value, int | float):
        return 0.5
    if parameter.is_logarithmic:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def _spread(parameters: Sequence[Parameter], trials: Sequence[Trial]) -> dict[str, list[float]]:
    """By a trial's name its height on each axis; those that share a choice lie beside each other, in their order."""
    heights: dict[str, list[float]] = {trial.name: [] for trial in trials}
    for parameter in parameters:
        groups: dict[float, list[str]] = {}
        for trial in trials:
            exists = parameter.path in trial.values
            place = unit_value(parameter, trial.values[parameter.path]) if exists else _ABSENT
            groups.setdefault(place, []).append(trial.name)
        largest = max(len(names) for names in groups.values())
        width = min(0.1, 0.35 / max(len(groups), 1)) if parameter.choices or parameter.kind == "integer" else 0.0
        for place, names in groups.items():
            for order, name in enumerate(names):
                step = (0.08 if place == _ABSENT else width) / largest
                heights[name].append(place - (order - (len(names) - 1) / 2) * step)
    return heights


def _draw_ticks(axes: Axes, x: float, ticks: Sequence[tuple[float, str]]) -> None:
    box = {"facecolor": BACKGROUND, "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
    look = {"color": INK, "fontsize": 8, "va": "center", "bbox": box, "zorder": 4}
    for y, text in ticks:
        axes.plot([x], [y], "_", color=FAINT, markersize=6, zorder=3)
        axes.annotate(as_it_is(text), (x, y), (6, 0), textcoords="offset points", **look)


def _draw_objective_axis(axes: Axes, sweep: Sweep, limits: tuple[float, float]) -> None:
    x = len(sweep.parameters)
    colors = color_map() if sweep.direction == "max" else color_map().reversed()
    strip = np.linspace(0, 1, 256)[:, None]
    axes.imshow(strip, cmap=colors, extent=(x, x + 0.08, 0, 1), origin="lower", aspect="auto", zorder=3)
    for value in _round_numbers(*limits):
        axes.annotate(
            f"{value:.6g}", (x + 0.08, _share(value, limits)), (3, 0), textcoords="offset points",
            color=INK, fontsize=8, va="center",
        )  # fmt: skip


def _share(objective: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return min(max((objective - low) / (high - low), 0.0), 1.0)


def _absence(sweep: Sweep, parameter: Parameter) -> list[tuple[float, str]]:
    lacking = any(parameter.path not in trial.values for trial in sweep.trials if trial.values)
    return [(_ABSENT, "not used")] if lacking else []


def _ticks(parameter: Parameter) -> list[tuple[float, str]]:
    """Height and text of each tick: every choice, every decade of a logarithmic axis, else some five numbers."""
    if parameter.choices:
        texts = [value_text(value, most=_LONGEST_LABEL) for value in parameter.choices]
        return [(unit_value(parameter, value), text) for value, text in zip(parameter.choices, texts, strict=True)]
    if parameter.low is None or parameter.high is None:
        return []
    if parameter.is_logarithmic:
        decades = range(math.ceil(math.log10(parameter.low) - 1e-9), math.floor(math.log10(parameter.high) + 1e-9) + 1)
        values = [10.0**decade for decade in decades]
        if len(values) < 2:
            values = [parameter.low, math.sqrt(parameter.low * parameter.high), parameter.high]
    else:
        values = _round_numbers(parameter.low, parameter.high, whole=parameter.kind == "integer")
    return [(unit_value(parameter, value), value_text(value)) for value in values]


def _round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Some five round numbers from `low` to `high`."""
    from matplotlib.ticker import MaxNLocator

    places = MaxNLocator(6, integer=whole, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    reach = 1e-9 * (high - low)
    return [float(place) + 0.0 for place in places if low - reach <= place <= high + reach]


def _wrap(name: str) -> str:
    """A long name in at most three lines, broken behind `.` and `_`; the end of it, where it is longer still."""
    lines = [""]
    for part in name.replace(".", ".\0").replace("_", "_\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > _LONGEST_LABEL:
            lines.append("")
        lines[-1] += part
    return "\n".join(shorten(line, 18) for line in lines[-3:])
