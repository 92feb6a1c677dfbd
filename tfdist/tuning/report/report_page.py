"""The page that shows a sweep: one HTML file with everything in it.

Invariant: it asks for nothing over the network (its policy forbids it), whatever stands in the journal is escaped, and
without its script it only stops sorting. `report.py` draws the plots that it is given.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.report.page import page_text
from tfdist.report.words import count_text, duration_text, gin_text, short_names, value_text
from tfdist.telemetry.console.console_text import number_text
from tfdist.tuning.schedule.history import Sweep, Trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot as PNG; `text` says what it shows and how to read it.

    On a narrow screen it is made to fit, and a press opens the file `name` beside the page, which can be enlarged.
    """

    name: str
    title: str
    text: str
    png: bytes


def build_page(sweep: Sweep, pictures: Sequence[Picture], *, link: Callable[[str], str]) -> str:
    """The whole page as HTML; `link` gives the address of a trial's run directory by its name."""
    title = f"Sweep for the {'highest' if sweep.direction == 'max' else 'lowest'} {sweep.objective}"
    parts = [
        _figures(sweep),
        _best(sweep),
        *(_picture(picture) for picture in pictures),
        _trials(sweep, link),
        _unreadable(sweep),
    ]
    return page_text(title, "\n".join(part for part in parts if part))


def _figures(sweep: Sweep) -> str:
    counts: dict[str, int] = {}
    for trial in sweep.trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    most = f" of {sweep.max_trials}" if sweep.max_trials is not None else ""
    rows = {
        "search": sweep.search,
        "state": "ended" if sweep.is_ended else "not ended",
        "trials": f"{len(sweep.trials)}{most}",
        "of these": statuses,
        "working time": duration_text(sweep.seconds),
        "started": sweep.started[:16].replace("T", " "),
    }
    cells = (f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in rows.items() if text)
    return f"<dl>{''.join(cells)}</dl>"


def _best(sweep: Sweep) -> str:
    best = sweep.best
    if best is None:
        return '<h2>Best trial</h2><p class="faint">No trial has ended with an objective yet.</p>'
    epochs = count_text(best.epochs, "epoch")
    told = f"Trial {best.name}: {sweep.objective} {number_text(best.objective or 0.0)} after {epochs}."
    return (
        f"<h2>Best trial</h2><p>{html.escape(told)}</p><pre>{html.escape(gin_text(sweep.settings(best.values)))}</pre>"
    )


def _picture(picture: Picture) -> str:
    title, text = html.escape(picture.title), html.escape(picture.text)
    width, height = struct.unpack(">II", picture.png[16:24])  # of the PNG's first chunk
    return (
        f'<section><h2>{title}</h2><p class="faint">{text}</p>'
        f'<a href="{html.escape(picture.name)}"><img alt="{title}. {text}" width="{width}" height="{height}" '
        f'src="{_data_uri(picture.png)}"></a></section>'
    )


def _data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _trials(sweep: Sweep, link: Callable[[str], str]) -> str:
    if not sweep.trials:
        return ""
    paths = list({path: None for trial in sweep.trials for path in trial.values})
    names = short_names(paths)
    numeric = {path: all(_is_number(t.values[path]) for t in sweep.trials if path in t.values) for path in paths}
    heads = [("trial", "", False), ("state", "", False), (sweep.objective, "", True)]
    heads += [("rung", "", True), ("epochs", "", True), ("seconds", "", True)]
    heads += [("node", "", False)] * any(trial.host for trial in sweep.trials)
    heads += [(names[path], path, numeric[path]) for path in paths] + [("message", "", False)]
    ranked = sweep.ranked
    columns = [name for name, _, _ in heads]
    order = [*ranked, *(trial for trial in sweep.trials if not trial.is_judged)]
    rows = "\n".join(_row(sweep, trial, paths, numeric, columns, link(trial.name)) for trial in order)
    return (
        '<section><h2>Trials</h2><p class="faint">The best first; a press on a column\'s name sorts by it, and on a '
        "trial opens its run directory.</p>"
        f'<div class="scroll" tabindex="0" role="group" aria-label="Trials"><table><thead><tr>'
        f"{''.join(_head(*head) for head in heads)}</tr></thead><tbody>\n{rows}\n</tbody></table></div></section>"
    )


def _head(name: str, path: str, is_number: bool) -> str:
    kind = ' class="number"' if is_number else ""
    told = f' title="{html.escape(path)}"' if path else ""
    return f'<th scope="col"{kind}><button type="button"{told}>{html.escape(name)}</button></th>'


def _row(
    sweep: Sweep, trial: Trial, paths: Sequence[str], numeric: dict[str, bool], columns: Sequence[str], address: str
) -> str:
    objective = trial.objective
    cells = [
        f'<td><a href="{html.escape(address)}">{html.escape(trial.name)}</a></td>',
        _cell(trial.status),
        _cell("" if objective is None else number_text(objective), objective),
        _cell(str(trial.rung), trial.rung),
        _cell(str(trial.epochs), trial.epochs),
        _cell(f"{trial.seconds:.0f}", trial.seconds),
    ]
    cells += [_cell(trial.host or "")] * any(each.host for each in sweep.trials)
    for path in paths:
        value = trial.values.get(path)
        text = value_text(value, most=40) if path in trial.values else ""
        cells.append(_cell(text, value if numeric[path] else None, is_number=numeric[path]))
    cells.append(f'<td class="text">{html.escape(trial.message)}</td>')
    mark = ' class="best"' if trial == sweep.best else ""
    named = (
        cell.replace("<td", f'<td data-name="{html.escape(name)}"', 1)
        for name, cell in zip(columns, cells, strict=True)
    )
    return f"<tr{mark}>{''.join(named)}</tr>"


def _cell(text: str, number: float | None = None, *, is_number: bool = False) -> str:
    kind = ' class="number"' if is_number or number is not None else ""
    value = f' data-value="{number!r}"' if number is not None else ""
    return f"<td{kind}{value}>{html.escape(text)}</td>"


def _unreadable(sweep: Sweep) -> str:
    count = sweep.num_unreadable_lines
    if not count:
        return ""
    lines = "One line" if count == 1 else f"{count} lines"
    return f'<p class="faint">{lines} of sweep.jsonl could not be read and are missing here.</p>'


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
