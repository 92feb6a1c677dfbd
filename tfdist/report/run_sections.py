"""What the page of one run shows, section by section.

Invariant: a section that has nothing to show is not there, so that half a run has a page, too. `report.py` calls
`sections_of`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.report.curves import LEARNING_RATE, Curve
from tfdist.report.figures import (
    STEPS,
    TIME,
    Axis,
    curves_plot,
    draw_marks,
    milliseconds,
)
from tfdist.report.page import Cell, Plot, Section, Table
from tfdist.report.run_data import BEGIN, ENDS, Run, is_metric
from tfdist.report.sample_sections import account, resources, shares_over_time, throughput
from tfdist.report.words import count_text, duration_text
from tfdist.telemetry.console.console_text import number_text
from tfdist.telemetry.facts import Event

TRAIN = "train"
MOST_MARKS, MOST_EVENTS = 300, 500  # of a kind; in the table
EVENT_NAMES = 130  # pixels
UNSHOWN_EVENTS = ("input_wait",)  # which comes every epoch
LEVEL_COLORS = {"info": "#4c8dd6", "warning": "#e08a1e", "error": "#d6453d"}


def sections_of(run: Run) -> list[Section]:
    """The sections of one run's page."""
    steps = Axis(STEPS, lines=[float(start.step) for start in run.starts[1:]])
    begins = [milliseconds(event.time) for event in run.events if event.name == BEGIN][1:]
    found = [
        _learning(run, steps),
        _story(run, Axis(TIME, lines=begins, left=EVENT_NAMES)),
        account(run),
        resources(run, Axis(TIME, lines=begins)),
        _configuration(run),
        _environment(run),
    ]
    return [section for section in found if section.plots or section.tables or section.facts]


# What was learned


def _learning(run: Run, axis: Axis) -> Section:
    by_metric: dict[str, dict[str, Curve]] = {}
    for (metric, split), curve in sorted(run.curves.items(), key=lambda item: item[0][1] != TRAIN):
        if is_metric(metric):
            by_metric.setdefault(metric, {})[split] = curve
    rates = [run.curves[key] for key in ((LEARNING_RATE, "train"), (LEARNING_RATE, "eval")) if key in run.curves]
    by_metric |= {"learning rate": {"learning rate": rates[0]}} if rates else {}
    norm = run.curves.get(("gradient_norm", TRAIN))
    by_metric |= {"norm of the gradient, before clipping": {TRAIN: norm}} if norm else {}
    plots = [curves_plot(metric, axis, curves, len(run.curves)) for metric, curves in by_metric.items()]
    again = "Dashed: where a start resumed." if len(run.starts) > 1 else ""
    return Section(title="Curves", text=again, plots=plots)


# What happened


def _story(run: Run, axis: Axis) -> Section:
    shown = [event for event in run.events if event.name not in UNSHOWN_EVENTS]
    if not shown and not run.samples:
        return Section(title="What happened")
    plots = []
    if shown:
        rows: dict[str, list[Event]] = {}
        for event in shown:
            rows.setdefault(event.name.replace("_", " "), []).append(event)
        marks = {name: [_mark(event) for event in _some(own, MOST_MARKS)] for name, own in rows.items()}
        left_out = sum(len(own) - len(marks[name]) for name, own in rows.items())
        note = f"{count_text(left_out, 'mark')} left out" if left_out else ""
        legend = [(color, level) for level, color in LEVEL_COLORS.items() if any(e.level == level for e in shown)]
        plots.append(Plot(title="Events", figure=draw_marks(axis, marks), legend=legend, note=note))
    plots += [*throughput(run, axis), *shares_over_time(run, axis)]
    text = "Over time (UTC)." + (" Dashed: where a start began." if len(run.starts) > 1 else "")
    return Section(title="What happened", text=text, plots=plots, tables=[_event_table(shown)], is_wide=True)


def _mark(event: Event) -> tuple[float, str, str]:
    return milliseconds(event.time), LEVEL_COLORS.get(event.level, LEVEL_COLORS["info"]), _sentence(event)


def _sentence(event: Event) -> str:
    """`12:03:01  step 1,200: Continuing at step 1,200.`"""
    step = "" if event.step is None else f"step {event.step:,}: "
    details = ", ".join(f"{name} {value}" for name, value in event.details.items())
    return f"{event.time:%H:%M:%S}  {step}{event.message or details or event.name}"


def _some(events: Sequence[Event], most: int) -> Sequence[Event]:
    """Evenly chosen ones, the first and the last among them."""
    if len(events) <= most:
        return events
    return [events[place] for place in np.linspace(0, len(events) - 1, most).astype(int)]


def _event_table(events: Sequence[Event]) -> Table:
    newest = [*events[-MOST_EVENTS:]]
    rows = [
        [
            Cell(f"{event.time:%Y-%m-%d %H:%M:%S}"),
            Cell(event.name, color=LEVEL_COLORS.get(event.level, "")),
            Cell("" if event.worker is None else str(event.worker), event.worker),
            Cell("" if event.step is None else f"{event.step:,}", event.step),
            Cell(event.message or ", ".join(f"{name} {value}" for name, value in event.details.items())),
        ]
        for event in newest
    ]
    title = (
        f"The newest {len(newest)} of {len(events)} events" if len(newest) < len(events) else f"{len(events)} events"
    )
    return Table(title=title, names=("time", "event", "worker", "step", "what"), rows=rows, is_folded=True)


# What it was


def _configuration(run: Run) -> Section:
    rows = [[Cell(name), Cell(value), Cell("stated")] for name, value in run.given.items()]
    rows += [[Cell(name), Cell(value), Cell("default")] for name, value in run.defaults.items()]
    title = f"{len(run.given)} settings stated, {len(run.defaults)} defaults used"
    tables = [Table(title=title, names=("setting", "value", "from"), rows=rows, is_folded=True)] if rows else []
    return Section(title="Configuration", tables=tables, code=run.config)


def _environment(run: Run) -> Section:
    hardware, versions = (run.result.hardware, run.result.versions) if run.result is not None else ({}, {})
    facts = [(name, str(version)) for name, version in versions.items()]
    facts += [(f"{kind} devices", str(count)) for kind, count in hardware.get("devices", {}).items()]
    facts += [("accelerator", name) for name in hardware.get("accelerators", {})]
    facts += [("CPUs", str(hardware["cpus"]))] if "cpus" in hardware else []
    return Section(title="Environment", facts=facts)


def summary_of(run: Run, status: str) -> list[tuple[str, str]]:
    """What stands on top of the page."""
    facts = {"status": status, "steps": f"{run.steps:,}", "strategy": run.fact("strategy")}
    facts |= {"workers": run.fact("num_workers"), "replicas": run.fact("num_replicas"), "starts": len(run.starts)}
    if run.began is not None and run.wall_seconds is not None:
        facts |= {"began": f"{run.began:%Y-%m-%d %H:%M} UTC", "wall clock": duration_text(run.wall_seconds)}
    if run.goodput is not None:
        facts["goodput"] = f"{run.goodput:.1%}"
    lost = sum(start.lost_steps for start in run.starts)
    facts |= {"steps done again": f"{lost:,}"} if lost else {}
    facts |= {name: number_text(value) for name, value in run.metrics.items()}
    return [(name, str(text)) for name, text in facts.items() if text is not None]


def notes_of(run: Run) -> list[str]:
    """What the figures of the run depend on."""
    notes: list[str] = []
    if run.result is not None:
        best = run.result.best
        if best and best.keys() >= {"metric", "value", "step"}:
            notes.append(f"Best {best['metric']}: {number_text(best['value'])} at step {best['step']:,}.")
        notes += run.result.notes
    failed = next((event for event in reversed(run.events) if event.name in ENDS), None)
    if failed is not None and not run.result:
        notes.append(f"{ENDS[failed.name]}: {_sentence(failed)}")
    if run.unreadable:
        notes.append(f"{count_text(run.unreadable, 'line')} of its logs could not be read and are missing here.")
    return notes
