"""What the plots of a sweep have in common: colors, and the range of the objective.

Invariant: drawn with Agg and without pyplot, so that nothing of the user's own figures is touched; colors come from
viridis, which the color-blind tell apart and which keeps its order in gray; the better, the more contrast.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfdist.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from tfdist.tuning.schedule.history import Sweep

DOTS_PER_INCH = 180
BACKGROUND, INK, FAINT, GRID = "#ffffff", "#1b1f24", "#6b7480", "#dfe3e8"


def color_map() -> Colormap:
    """Returns the colors from the worst to the best."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("objective", matplotlib.colormaps["viridis"](np.linspace(0.88, 0.0, 256)))


def new_figure(*, width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of that many inches with one pair of axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "tuner", "The plots of a sweep") from None
    figure = Figure(figsize=(width, height), facecolor=BACKGROUND, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor(BACKGROUND)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def label_axes(axes: Axes, *, x: str, y: str) -> None:
    """Names the axes."""
    axes.set_xlabel(as_it_is(x), color=INK, fontsize=10)
    axes.set_ylabel(as_it_is(y), color=INK, fontsize=10)


def as_it_is(text: str) -> str:
    """The text such that matplotlib takes no part of it for a formula."""
    return text.replace("$", r"\$")


def say_instead(axes: Axes, text: str) -> None:
    """A sentence in the place of a plot that has nothing to show."""
    axes.figure.set_figheight(1.0)
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, color=FAINT, fontsize=11, ha="center", va="center", transform=axes.transAxes)


def add_legend(axes: Axes) -> None:
    """Below the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(
            handles, labels, loc="outside lower center", ncols=6, frameon=False, labelcolor=INK, fontsize=9
        )


def png(figure: Figure) -> bytes:
    """Draws the figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


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
    if high <= low:
        margin = abs(low) * 0.05 or 0.5
        return low - margin, high + margin
    return float(low), float(high)
