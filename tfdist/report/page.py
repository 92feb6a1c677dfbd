"""The frame that the pages of runs and of sweeps share, and what a run's page is made of.

Invariant: a page is one file that asks for nothing over the network (its policy forbids it); whatever text it shows is
escaped, but what `page_text` is given as HTML.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

LONG_TEXT = 30  # characters, from which on a cell may take several lines


@dataclasses.dataclass(frozen=True)
class Cell:
    """Of a table; `number` is what it is sorted by, `color` a mark before the text."""

    text: str
    number: float | None = None
    color: str = ""

    @property
    def is_long(self) -> bool:
        return len(self.text) > LONG_TEXT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table that is sorted by a press on a column's name; a folded one is opened by a press on its title."""

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_folded: bool = False

    def is_numeric(self, column: int) -> bool:
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
    """A part of a page; the plots of a wide one stand below each other, so that their axes do."""

    title: str
    text: str = ""
    facts: Sequence[tuple[str, str]] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    code: str = ""
    is_wide: bool = False


def run_page(
    title: str,
    summary: Sequence[tuple[str, str]],
    notes: Sequence[str],
    sections: Sequence[Section],
    *,
    refresh_seconds: int | None = None,
) -> str:
    """The page as HTML. `refresh_seconds`: after which a browser reads it again."""
    from bokeh import embed, resources

    plots = [plot for section in sections for plot in section.plots]
    script, places = embed.components([plot.figure for plot in plots], wrap_script=False) if plots else ("", ())
    placed = {id(plot): place for plot, place in zip(plots, places, strict=True)}
    shown = [
        {**vars(section), "plots": [{**vars(plot), "place": _markup(placed[id(plot)])} for plot in section.plots]}
        for section in sections
    ]
    body = _fill("sections.html.jinja", summary=summary, notes=notes, sections=shown)
    bokeh = resources.Resources(mode="inline", components=["bokeh"]).js_raw if plots else []
    return page_text(title, body, scripts=[*bokeh, script], refresh_seconds=refresh_seconds)


def page_text(title: str, body: str, *, scripts: Sequence[str] = (), refresh_seconds: int | None = None) -> str:
    """A whole page as HTML.

    Args:
      title: text.
      body: HTML.
      scripts: JavaScript.
      refresh_seconds: after which a browser reads the page again.
    """
    return _fill(
        "page.html.jinja",
        title=title,
        body=_markup(body),
        scripts=[_markup(script.replace("</script", "<\\/script")) for script in scripts],
        refresh_seconds=refresh_seconds,
    )


def _fill(template: str, **values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdist.report", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def _markup(text: str) -> Any:
    """HTML that a template takes as it stands."""
    import markupsafe

    return markupsafe.Markup(text)
