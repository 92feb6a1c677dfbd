"""The page of a run, of several runs or of a sweep: sections of figures, tables and text, as one HTML file.

Invariant: a page asks for nothing over the network (its policy forbids it), and all text on it is escaped. It is
replaced whole, so that a browser never reads half of one; Bokeh is imported when a page is first drawn, TensorFlow
never. The command `python -m tfdist.report` and the end of a training call it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

from tfdist.errors import missing_extra
from tfdist.report.run_data import read_run
from tfdist.storage import files
from tfdist.telemetry.facts import now
from tfdist.telemetry.run_directory import RunDirectory

LONG_TEXT = 30  # characters, from which on a cell may take several lines


@dataclasses.dataclass(frozen=True)
class Cell:
    """Of a table; `number` is what it is sorted by, `color` a mark before the text, `link` an address."""

    text: str
    number: float | None = None
    color: str = ""
    link: str = ""

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
    """A part of a page, which is left out where it has nothing to show.

    Attributes:
      code: gin text; folded under `code_title` where there is one.
      is_wide: plots stand below each other, so that their axes do.
    """

    title: str
    text: str = ""
    facts: Sequence[tuple[str, str]] = ()
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    code: str = ""
    code_title: str = ""
    is_wide: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.facts or self.plots or self.tables or self.code)


def can_draw() -> bool:
    """Whether Bokeh is installed."""
    return importlib.util.find_spec("bokeh") is not None


def check_can_draw() -> None:
    """Raises UserError where Bokeh is not installed."""
    if not can_draw():
        raise missing_extra("bokeh", "report", "The page of a run or of a sweep")


def write_run_page(run_dir: str) -> str:
    """Writes RUN/report/index.html; returns its path."""
    check_can_draw()
    from tfdist.report.run_page import build_sections, list_notes, summarize_run

    run = read_run(run_dir)
    name = run.path.rstrip("/").rpartition("/")[2] or run.path
    summary = summarize_run(run, run.status(now()))
    return store_page(run.path, build_page(name, build_sections(run), summary=summary, notes=list_notes(run)))


def store_page(run_dir: str, page: str) -> str:
    """Writes a page where that of a run or a sweep belongs; returns its path."""
    directory = RunDirectory(run_dir).report
    files.make_dirs(directory)
    path = files.join(directory, "index.html")
    files.write_atomic(path, page)
    return path


def write_comparison(run_dirs: Sequence[str], path: str) -> str:
    """Writes the page of several runs to `path`, which it returns."""
    check_can_draw()
    from tfdist.report.comparison import build_comparison

    sections = build_comparison([read_run(run_dir) for run_dir in run_dirs], now())
    files.write_atomic(path, build_page(f"{len(run_dirs)} runs", sections))
    return path


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
    scripts, places = [], {}
    if plots:
        script, divisions = embed.components([plot.figure for plot in plots], wrap_script=False)
        scripts = [*resources.Resources(mode="inline", components=["bokeh"]).js_raw, script]
        places = {id(plot): Markup(division) for plot, division in zip(plots, divisions, strict=True)}
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
        place_of=lambda plot: places[id(plot)],
        scripts=[Markup(script.replace("</script", "<\\/script")) for script in scripts],
    )
