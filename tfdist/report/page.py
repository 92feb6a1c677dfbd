"""The page of a run, of several runs or of a sweep: sections of figures, tables and text, as one HTML file.

Invariant: a page asks for nothing over the network (its policy forbids it), and all text on it is escaped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

LONG_TEXT = 30  # characters, from which on a cell may take several lines


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table; `number` is what it is sorted by, `color` a mark before the text, `link` an address."""

    text: str
    number: float | None = None
    color: str = ""
    link: str = ""

    @property
    def is_long(self) -> bool:
        return len(self.text) > LONG_TEXT


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageTable:
    """A table that is sorted by a press on a column's name; a folded one is opened by a press on its title."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_folded: bool = False

    def is_numeric(self, column: int) -> bool:
        """Whether any cell of a column has a number, by which the page then sorts it."""
        return any(row[column].number is not None for row in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure with what stands above it.

    Attributes:
      figure: Bokeh's.
      legend: colors and what they stand for.
      note: what the figure does not show.
    """

    title: str
    figure: Any
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page, which is left out where it has nothing to show.

    Attributes:
      code: gin text; folded under `code_title` where there is one.
      is_wide: plots stand below each other, so that their axes do.
    """

    title: str
    text: str = ""
    facts: Sequence[tuple[str, str]] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[PageTable] = ()
    code: str = ""
    code_title: str = ""
    is_wide: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.facts or self.plots or self.tables or self.code)


def build_page(
    title: str,
    sections: Sequence[Section],
    *,
    summary: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> str:
    """Returns the page as HTML."""
    import jinja2
    from bokeh import embed, resources
    from markupsafe import Markup

    sections = [section for section in sections if not section.is_empty]
    plots = [plot for section in sections for plot in section.plots]
    scripts, divisions_by_plot = [], {}
    if plots:
        script, divisions = embed.components([plot.figure for plot in plots], wrap_script=False)
        scripts = [*resources.Resources(mode="inline", components=["bokeh"]).js_raw, script]
        divisions_by_plot = {id(plot): Markup(division) for plot, division in zip(plots, divisions, strict=True)}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdist.report", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        title=title,
        summary=summary,
        notes=notes,
        sections=sections,
        division_of=lambda plot: divisions_by_plot[id(plot)],
        scripts=[Markup(script.replace("</script", "<\\/script")) for script in scripts],
    )
