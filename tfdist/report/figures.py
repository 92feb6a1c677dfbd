"""Figures that Bokeh draws: curves, stacked bars and marks, over steps or over time.

Invariant: all colors can be read on light and on dark, since the page takes the reader's preference; a figure takes the
width of its place, and does not keep a finger from scrolling the page. `run_sections.py` and `comparison.py` fill them.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import missing_extra
from tfdist.report.curves import Curve
from tfdist.report.page import Plot
from tfdist.report.words import count_text

try:
    from bokeh.models import (
        BasicTickFormatter,
        BoxZoomTool,
        ColumnDataSource,
        FixedTicker,
        HoverTool,
        NoOverlap,
        NumeralTickFormatter,
        Range1d,
        Span,
    )
    from bokeh.palettes import Category10_10
    from bokeh.plotting import figure as new_bokeh_figure
except ImportError:
    raise missing_extra("bokeh", "report", "The report of a run") from None

INK, GRID = "#7a8490", "#8a94a033"
STEPS, TIME = "step", "time"
FULL = 1.0
HEIGHT = 260
MOST_POINTS, ALL_POINTS, LEAST_POINTS = 2000, 60_000, 100  # of a curve; of a page


def color_of(place: int) -> str:
    """The color of a series, by its place among them."""
    return str(Category10_10[place % len(Category10_10)])


def milliseconds(time: datetime.datetime) -> float:
    """A moment as a time axis has it."""
    return time.timestamp() * 1000


class Axis:
    """An axis along which several figures lie, and move together.

    Args:
      kind: STEPS or TIME, in milliseconds.
      lines: places where something began anew.
      left: pixels before the axis begins, so that those of figures below each other begin together.
    """

    def __init__(self, kind: str, *, lines: Sequence[float] = (), left: int = 0) -> None:
        self.kind = kind
        self._lines = lines
        self._left = left
        self._range: Any = None

    def figure(self, *, height: int = HEIGHT, **options: Any) -> Any:
        """An empty figure along it."""
        scale = "datetime" if self.kind == TIME else "auto"
        own = {} if self._range is None else {"x_range": self._range}
        made = new_bokeh_figure(
            height=height, sizing_mode="stretch_width", x_axis_type=scale, tools="xpan,reset,save", **own, **options
        )
        self._range = made.x_range
        _dress(made)
        made.add_tools(BoxZoomTool(dimensions="width"))
        made.toolbar.active_drag = None
        made.min_border_left = self._left
        if self.kind == STEPS:
            made.xaxis.axis_label = STEPS
            made.xaxis.formatter = NumeralTickFormatter(format="0,0")
        for place in self._lines:
            made.add_layout(Span(location=place, dimension="height", line_color=INK, line_dash="dashed"))
        return made


def draw_curves(axis: Axis, curves: Mapping[str, Curve | None], *, most: int, y_format: str = "") -> Any:
    """Lines in the colors of their places.

    Args:
      axis: along which they run.
      curves: by name; None where there is none of it. Over time their `steps` are milliseconds.
      most: points of each.
      y_format: of the values, as NumeralTickFormatter has it.
    """
    made = axis.figure()
    made.yaxis.formatter = NumeralTickFormatter(format=y_format) if y_format else BasicTickFormatter(power_limit_low=-6)
    largest = max(
        (np.nanmax(np.abs(curve.values), initial=0.0) for curve in curves.values() if curve is not None), default=0.0
    )
    made.y_range.default_span = float(largest) or FULL  # of a line that is level
    for place, (name, curve) in enumerate(curves.items()):
        if curve is None:
            continue
        shown = curve.thinned(most)
        source = ColumnDataSource({"x": shown.steps.astype(float), "y": shown.values})
        line = made.line("x", "y", source=source, color=color_of(place), line_width=1.8)
        if len(shown.steps) == 1:
            line = made.scatter("x", "y", source=source, color=color_of(place), size=7)
        at = "@x{%F %T}" if axis.kind == TIME else "@x{0,0}"
        value = f"@y{{{y_format}}}" if y_format else "@y"
        made.add_tools(
            HoverTool(
                renderers=[line],
                mode="vline",
                line_policy="nearest",
                tooltips=f"{_plain(name)} {value} · {at}",
                formatters={"@x": "datetime"} if axis.kind == TIME else {},
                visible=False,
            )
        )
    return made


def curves_plot(
    title: str, axis: Axis, curves: Mapping[str, Curve | None], num_curves: int, *, y_format: str = ""
) -> Plot:
    """The curves in one figure, in the colors of their places; None takes a color and has no curve."""
    missing = 0 if axis.kind == TIME else sum(c.num_not_finite for c in curves.values() if c is not None)
    named = [(color_of(place), name) for place, (name, curve) in enumerate(curves.items()) if curve is not None]
    return Plot(
        title=title,
        figure=draw_curves(axis, curves, most=points_of(num_curves), y_format=y_format),
        legend=named if len(curves) > 1 else [],
        note=f"{count_text(missing, 'point')} not finite" if missing else "",
    )


def points_of(num_curves: int) -> int:
    """How many points a curve may have, so that the page stays small."""
    return max(min(MOST_POINTS, ALL_POINTS // max(num_curves, 1)), LEAST_POINTS)


def draw_bars(rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]) -> Any:
    """A bar for each row, from the parts that add up to it, the first on top."""
    names = list(rows)
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    made = new_bokeh_figure(
        y_range=names[::-1],
        x_range=Range1d(0, longest or FULL),
        height=70 + 26 * len(names),
        sizing_mode="stretch_width",
        tools="save",
    )
    _dress(made)
    made.ygrid.visible = False
    made.xaxis.axis_label = "seconds"
    made.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")  # of a short run ticks are fractions
    left = dict.fromkeys(names, 0.0)
    for share, color in colors.items():
        own = {name: parts.get(share, 0.0) for name, parts in rows.items() if parts.get(share, 0.0) > 0}
        if not own:
            continue
        ends = {name: left[name] + value for name, value in own.items()}
        source = ColumnDataSource(
            {
                "name": list(own),
                "left": [left[name] for name in own],
                "right": list(ends.values()),
                "s": list(own.values()),
            }
        )
        bar = made.hbar(y="name", left="left", right="right", height=0.75, source=source, color=color)
        made.add_tools(HoverTool(renderers=[bar], tooltips=f"@name: {_plain(share)} @s{{0,0.0}} s", visible=False))
        left |= ends
    return made


def draw_shares(
    axis: Axis, spans: Sequence[tuple[float, float, Mapping[str, float]]], colors: Mapping[str, str]
) -> Any:
    """What each span of time went into, as parts of its height; `spans` are begin, end (milliseconds) and seconds."""
    made = axis.figure(height=150, y_range=Range1d(0, FULL))
    made.yaxis.formatter = NumeralTickFormatter(format="0%")
    made.yaxis.ticker = FixedTicker(ticks=[0, 0.5, 1])
    bottoms = [0.0] * len(spans)
    for share, color in colors.items():
        rows: list[tuple[float, float, float, float]] = []
        for number, (begin, end, seconds) in enumerate(spans):
            part = seconds.get(share, 0.0) / (sum(seconds.values()) or FULL)
            if part > 0:
                rows.append((begin, end, bottoms[number], bottoms[number] + part))
                bottoms[number] += part
        if rows:
            columns = zip(("left", "right", "bottom", "top"), np.array(rows).T, strict=True)
            quads = made.quad(
                left="left",
                right="right",
                bottom="bottom",
                top="top",
                source=ColumnDataSource(dict(columns)),
                color=color,
            )
            made.add_tools(HoverTool(renderers=[quads], tooltips=_plain(share), visible=False))
    return made


def draw_marks(axis: Axis, rows: Mapping[str, Sequence[tuple[float, str, str]]]) -> Any:
    """A row of marks for each name; a mark is where it stands, its color, and what it says."""
    made = axis.figure(height=80 + 24 * len(rows), y_range=list(rows)[::-1])
    marks = [(place, name, color, text) for name, own in rows.items() for place, color, text in own]
    columns = dict(zip(("x", "name", "color", "text"), zip(*marks, strict=True), strict=True))
    shown = made.scatter("x", "name", color="color", size=9, source=ColumnDataSource(columns))
    made.add_tools(HoverTool(renderers=[shown], tooltips="@text", visible=False))
    return made


def _dress(made: Any) -> None:
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


def _plain(text: str) -> str:
    """A text in which a tooltip finds no reference and no tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("@", "@\u200b").replace("$", "$\u200b")
