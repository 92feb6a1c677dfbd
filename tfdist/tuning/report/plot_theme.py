"""What the plots of a sweep have in common: colors on light and on dark, and the range of the objective.

Invariant: drawn with Agg and without pyplot, so that nothing of the user's own figures is touched; colors come from
viridis, which the color-blind tell apart and which keeps its order in gray; the better, the more contrast.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdist.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from tfdist.tuning.schedule.history import Sweep

DOTS_PER_INCH = 180


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theme:
    """Colors; `worst` and `best` are places on viridis between 0 and 1."""

    background: str
    ink: str
    faint: str
    grid: str
    worst: float
    best: float

    def colors(self) -> Colormap:
        """The color map from the worst to the best."""
        import matplotlib
        from matplotlib.colors import LinearSegmentedColormap

        viridis = matplotlib.colormaps["viridis"]
        return LinearSegmentedColormap.from_list("objective", viridis(np.linspace(self.worst, self.best, 256)))


LIGHT = Theme(background="#ffffff", ink="#1b1f24", faint="#6b7480", grid="#dfe3e8", worst=0.88, best=0.0)
DARK = Theme(background="#14181d", ink="#e8ecf0", faint="#97a1ad", grid="#333a43", worst=0.3, best=1.0)


def new_figure(theme: Theme, *, width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of that many inches with one pair of axes in the colors of the theme."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "tuner", "The plots of a sweep") from None
    figure = Figure(figsize=(width, height), facecolor=theme.background, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor(theme.background)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.faint)
    axes.tick_params(colors=theme.faint, labelcolor=theme.ink, labelsize=9)
    axes.grid(color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def label_axes(axes: Axes, theme: Theme, *, x: str, y: str) -> None:
    """Names the axes, in the colors of the theme."""
    axes.set_xlabel(as_it_is(x), color=theme.ink, fontsize=10)
    axes.set_ylabel(as_it_is(y), color=theme.ink, fontsize=10)


def as_it_is(text: str) -> str:
    """The text such that matplotlib takes no part of it for a formula."""
    return text.replace("$", r"\$")


def say_instead(axes: Axes, theme: Theme, text: str) -> None:
    """A sentence in the place of a plot that has nothing to show."""
    axes.figure.set_figheight(1.0)
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, color=theme.faint, fontsize=11, ha="center", va="center", transform=axes.transAxes)


def add_legend(axes: Axes, theme: Theme) -> None:
    """Below the axes, where it hides no data."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(
            handles, labels, loc="outside lower center", ncols=6, frameon=False, labelcolor=theme.ink, fontsize=9
        )


def png(figure: Figure) -> bytes:
    """The figure as a PNG file of 256 colors, a third of the size of one with all of them."""
    import PIL.Image  # which matplotlib requires
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(DOTS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = PIL.Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    few = image.quantize(256, method=PIL.Image.Quantize.FASTOCTREE, dither=PIL.Image.Dither.NONE)
    palette: Any = few.getpalette()
    corner: Any = few.getpixel((0, 0))
    background = 3 * corner
    palette[background : background + 3] = image.getpixel((0, 0))  # an edge would show where it is not the page's own
    few.putpalette(palette)
    few.save(buffer, format="PNG")
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
