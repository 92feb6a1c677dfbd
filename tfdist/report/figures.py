"""Figures that Bokeh draws: curves, points and stacked bars, over steps or over time.

Invariant: all colors can be read on light and on dark, since the page takes the reader's preference; a figure takes the
width of its place, and does not keep a finger from scrolling the page.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    HoverTool,
    NoOverlap,
    NumeralTickFormatter,
    Range1d,
    Span,
)
from bokeh.palettes import Category10_10
from bokeh.plotting import figure as new_bokeh_figure

from tfdist.report.page import Plot
from tfdist.report.run_data import Curve
from tfdist.telemetry.console.console_text import count_text

INK, GRID = "#7a8490", "#8a94a033"
STEPS, TIME = "step", "time"
FULL = 1.0
HEIGHT = 260
MAX_POINTS = 1000  # of a curve


def choose_color(index: int) -> str:
    """The color of series `index`."""
    return str(Category10_10[index % len(Category10_10)])


def to_milliseconds(time: datetime.datetime) -> float:
    """A moment as a time axis has it."""
    return time.timestamp() * 1000


class Axis:
    """An axis along which several figures lie, and move together.

    Args:
      kind: TIME, in milliseconds, or the unit, such as STEPS.
      lines: values of x to mark, where a start resumed.
      left: pixels before the axis begins, so that those of figures below each other begin together.
    """

    def __init__(self, kind: str, *, lines: Sequence[float] = (), left: int = 0) -> None:
        self.kind = kind
        self._lines = lines
        self._left = left
        self._range: Any = None

    def figure(self, *, height: int = HEIGHT, **options: Any) -> Any:
        """Builds an empty figure along this axis."""
        if self._range is not None:
            options["x_range"] = self._range
        made = _new_figure(
            height=height, x_axis_type="datetime" if self.kind == TIME else "linear", tools="xpan,reset,save", **options
        )
        self._range = made.x_range
        made.add_tools(BoxZoomTool(dimensions="width"))
        made.toolbar.active_drag = None
        made.min_border_left = self._left
        if self.kind != TIME:
            made.xaxis.axis_label = self.kind
            made.xaxis.formatter = NumeralTickFormatter(format="0,0")
        for x in self._lines:
            made.add_layout(Span(location=x, dimension="height", line_color=INK, line_dash="dashed"))
        return made


def draw_curves(
    title: str,
    axis: Axis,
    curves: Mapping[str, Curve | None],
    *,
    y_format: str = "",
    highlighted: str | None = None,
    y_range: tuple[float, float] | None = None,
) -> Plot:
    """Lines in the colors of their indices, or, where one is `highlighted`, that one in color.

    Args:
      title: of the plot.
      axis: along which they run.
      curves: by name; None where there is none of it. Over time their `steps` are milliseconds.
      y_format: of the values, as NumeralTickFormatter has it.
      highlighted: the name of one of them.
      y_range: what to show of the values; else all.
    """
    made = axis.figure(**({} if y_range is None else {"y_range": Range1d(*y_range)}))
    made.yaxis.formatter = NumeralTickFormatter(format=y_format) if y_format else BasicTickFormatter(power_limit_low=-6)
    drawn = {name: curve for name, curve in curves.items() if curve is not None}
    if y_range is None:
        largest = max((float(np.nanmax(np.abs(curve.values), initial=0.0)) for curve in drawn.values()), default=0.0)
        made.y_range.default_span = largest or FULL  # of a line that is level
        if y_format:  # has so many digits that ticks of a smaller range would read alike
            made.y_range.update(range_padding=largest / 40, range_padding_units="absolute")
    colors = {name: choose_color(index) for index, name in enumerate(curves)}
    if highlighted is not None:
        colors = dict.fromkeys(curves, INK) | {highlighted: choose_color(0)}
    for name, curve in drawn.items():
        shown = curve.downsample(MAX_POINTS)
        source = ColumnDataSource({"x": shown.steps.astype(float), "y": shown.values})
        look = {"color": colors[name], "alpha": 0.5 if highlighted not in (None, name) else 1.0}
        line = made.line("x", "y", source=source, line_width=1.8, **look)
        if len(shown.steps) == 1:
            line = made.scatter("x", "y", source=source, size=7, **look)
        value = f"@y{{{y_format}}}" if y_format else "@y"
        x, formatters = ("@x{%F %T}", {"@x": "datetime"}) if axis.kind == TIME else ("@x{0,0}", {})
        tooltip = f"{_escape_tooltip(name)} {value} · {x}"
        _add_hover(made, line, tooltip, mode="vline", line_policy="nearest", formatters=formatters)
    named = [name for name in drawn if highlighted is None or name == highlighted]
    hidden = dict.fromkeys(a for a, b in itertools.combinations(named, 2) if drawn[a].coincides(drawn[b]))
    notes = [f"covered by another line: {', '.join(hidden)}"] if hidden else []
    missing = 0 if axis.kind == TIME else sum(curve.num_not_finite for curve in drawn.values())
    notes += [f"{count_text(missing, 'point')} not finite"] if missing else []
    return Plot(
        title=title,
        figure=made,
        legend=[(colors[name], name) for name in named] if len(curves) > 1 else [],
        note="; ".join(notes),
    )


def draw_bars(rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]) -> Any:
    """A bar for each row, from the parts in seconds that add up to it, the first on top."""
    names = list(rows)
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    x_range = Range1d(0, longest or FULL)
    made = _new_figure(y_range=names[::-1], x_range=x_range, height=70 + 26 * len(names), tools="save")
    made.ygrid.visible = False
    made.xaxis.axis_label = "seconds"
    made.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")  # of a short run ticks are fractions
    shares = [share for share in colors if any(parts.get(share) for parts in rows.values())]
    columns = {share: [rows[name].get(share, 0.0) for name in names] for share in shares}
    source = ColumnDataSource({"name": names, **columns})
    bars = made.hbar_stack(shares, y="name", height=0.75, source=source, color=[colors[share] for share in shares])
    for share, bar in zip(shares, bars, strict=True):
        _add_hover(made, bar, f"@name: {_escape_tooltip(share)} @{{{share}}}{{0,0.0}} s")
    return made


def draw_points(points: Sequence[tuple[Any, Any, str, str]], axis: Axis | None = None, **options: Any) -> Any:
    """Points at (x, y) with color and text, along an axis or in a figure of their own; the options are a figure's."""
    made = _new_figure(tools="save", **{"height": HEIGHT, **options}) if axis is None else axis.figure(**options)
    columns = dict(zip(("x", "y", "color", "text"), zip(*points, strict=True), strict=True))
    shown = made.scatter("x", "y", color="color", size=8, source=ColumnDataSource(columns))
    _add_hover(made, shown, "@text")
    return made


def _add_hover(made: Any, renderer: Any, tooltips: str, **options: Any) -> None:
    made.add_tools(HoverTool(renderers=[renderer], tooltips=tooltips, visible=False, **options))


def _new_figure(**options: Any) -> Any:
    made = new_bokeh_figure(sizing_mode="stretch_width", **options)
    made.background_fill_color = made.border_fill_color = made.outline_line_color = None
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.grid.grid_line_color = GRID
    made.axis.axis_line_color = made.axis.major_tick_line_color = made.axis.axis_label_text_color = INK
    made.axis.minor_tick_line_color = None
    made.axis.major_label_text_color = INK
    made.axis.axis_label_text_font_style = "normal"
    made.xaxis.major_label_policy = NoOverlap(min_distance=8)  # pixels
    made.min_border_right = 12
    return made


def _escape_tooltip(text: str) -> str:
    """Escapes what a tooltip would take for a reference or a tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("@", "@\u200b").replace("$", "$\u200b")
