"""What the page of one run shows, section by section.

Invariant: a section that has nothing to show is not there, so that half a run has a page, too. `report.py` calls
`sections_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tfdist.report.curves import LEARNING_RATE, Curve
from tfdist.report.figures import (
    STEPS,
    TIME,
    Axis,
    color_of,
    draw_bars,
    draw_curves,
    draw_marks,
    draw_shares,
    milliseconds,
)
from tfdist.report.page import Cell, Plot, Section, Table
from tfdist.report.run_data import BEGIN, ENDS, Run, is_metric
from tfdist.report.words import count_text, duration_text
from tfdist.telemetry.console.console_text import number_text
from tfdist.telemetry.facts import Event, Sample
from tfdist.telemetry.goodput import ALL_SHARES, Interval, total

TRAIN = "train"
MOST_POINTS, ALL_POINTS, LEAST_POINTS = 2000, 60_000, 100  # of a curve; of a page
MOST_WORKERS = 16  # that are shown one by one
MOST_SPANS = 150  # of time, in which a worker's shares are shown
MOST_MARKS, MOST_EVENTS = 300, 500  # of a kind; in the table
EVENT_NAMES = 130  # pixels
UNSHOWN_EVENTS = ("input_wait",)  # which comes every epoch
LEVEL_COLORS = {"info": "#4c8dd6", "warning": "#e08a1e", "error": "#d6453d"}
NORMS = {
    "gradient_norm": "Norm of the gradient, before clipping",
    "update_norm": "Norm of the update",
    "update_ratio": "Norm of the update ÷ norm of the weights",
    "clipped": "Share of the steps looked at whose gradient was clipped",
}
SHARE_COLORS = {
    "compute": "#2f9e62",
    "input_wait": "#e0a11e",
    "peer_wait": "#e8702a",
    "callbacks": "#8d7ad1",
    "evaluate": "#3f8fd0",
    "checkpoint": "#27a5b5",
    "import": "#b9c0c9",
    "connect": "#a3adb8",
    "data": "#8d98a5",
    "build": "#788493",
    "restore": "#647182",
    "finish": "#d0a9c4",
    "lost: steps done again": "#d6453d",
    "lost: between starts": "#8f2d2a",
}
# What samples hold: title, format of its axis, and whether it is a total, whose growth is shown.
VALUES = {
    "host_memory_bytes": ("Memory of the host's process", "0.[00] d", False),
    "device_memory_bytes": ("Device memory in use", "0.[00] d", False),
    "device_memory_peak_bytes": ("Device memory, peak", "0.[00] d", False),
    "cpu_utilization": ("CPU, of the process's cores", "0%", False),
    "gpu_utilization": ("GPU", "0%", False),
    "network_sent_bytes": ("Network, sent a second", "0.[00] d", True),
    "network_received_bytes": ("Network, received a second", "0.[00] d", True),
    "storage_written_bytes": ("Storage, written a second", "0.[00] d", True),
    "storage_read_bytes": ("Storage, read a second", "0.[00] d", True),
}


def sections_of(run: Run) -> list[Section]:
    """The sections of one run's page."""
    steps = Axis(STEPS, lines=[float(start["step"]) for start in run.starts[1:]])
    begins = [milliseconds(event.time) for event in run.events if event.name == BEGIN][1:]
    found = [
        _learning(run, steps),
        _norms(run, steps),
        _story(run, Axis(TIME, lines=begins, left=EVENT_NAMES)),
        _account(run),
        _resources(run, Axis(TIME, lines=begins)),
        _configuration(run),
        _environment(run),
    ]
    return [section for section in found if section.plots or section.tables or section.facts]


def points_of(num_curves: int) -> int:
    """How many points a curve may have, so that the page stays small."""
    return max(min(MOST_POINTS, ALL_POINTS // max(num_curves, 1)), LEAST_POINTS)


# What was learned


def _learning(run: Run, axis: Axis) -> Section:
    by_metric: dict[str, dict[str, Curve]] = {}
    for (metric, split), curve in sorted(run.curves.items(), key=lambda item: item[0][1] != TRAIN):
        if is_metric(metric):
            by_metric.setdefault(metric, {})[split] = curve
    rates = [run.curves[key] for key in ((LEARNING_RATE, "train"), (LEARNING_RATE, "eval")) if key in run.curves]
    by_metric |= {"learning rate": {"learning rate": rates[0]}} if rates else {}
    plots = [curves_plot(metric, axis, curves, len(run.curves)) for metric, curves in by_metric.items()]
    again = "Dashed: where a start resumed." if len(run.starts) > 1 else ""
    return Section(title="Curves", text=again, plots=plots)


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


def _norms(run: Run, axis: Axis) -> Section:
    plots = []
    for kind, title in NORMS.items():
        of_kind = {
            metric.partition("/")[2] or "all": curve
            for (metric, split), curve in run.curves.items()
            if split == "train" and metric.partition("/")[0] == kind
        }
        if of_kind:
            plots.append(curves_plot(title, axis, of_kind, len(run.curves)))
    return Section(title="Gradients and updates", plots=plots)


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
    plots += _throughput(run, axis)
    plots += _over_time(run, axis)
    text = "Over time (UTC)." + (" Dashed: where a start began." if len(run.starts) > 1 else "")
    return Section(title="What happened", text=text, plots=plots, tables=[_event_table(shown)], is_wide=True)


def _mark(event: Event) -> tuple[float, str, str]:
    return milliseconds(event.time), LEVEL_COLORS.get(event.level, LEVEL_COLORS["info"]), _sentence(event)


def _sentence(event: Event) -> str:
    """`12:03:01  step 1,200: Continuing at step 1,200.`"""
    step = "" if event.step is None else f"step {event.step:,}: "
    details = ", ".join(f"{name} {value}" for name, value in event.details.items())
    return f"{event.time:%H:%M:%S}  {step}{event.message or details or event.name}"


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


def _throughput(run: Run, axis: Axis) -> list[Plot]:
    batch = run.fact("global_batch_size") or run.settings.get("train.global_batch_size", "")
    examples = int(batch) if str(batch).isdigit() else None
    unit = "steps" if examples is None else "examples"
    rates = []
    for process in _processes(run.samples, worker=0):
        known = [(milliseconds(s.time), float(s.step)) for s in process if s.step is not None]
        rates.append(_rates(known, per=float(examples or 1)))
    curve = _joined(rates)
    return (
        [] if curve is None else [curves_plot(f"Throughput, {unit} a second", axis, {unit: curve}, 1, y_format="0,0")]
    )


def _over_time(run: Run, axis: Axis) -> list[Plot]:
    of_workers = run.intervals
    plots = []
    for worker, own in list(of_workers.items())[:MOST_WORKERS]:
        spans = [(milliseconds(part[0].begin), milliseconds(part[-1].end), total(part).seconds) for part in _parts(own)]
        name = f"Worker {worker}" if len(of_workers) > 1 else "Where the time went"
        legend = _share_legend(total(own).seconds) if worker == min(of_workers) else []
        plots.append(Plot(title=name, figure=draw_shares(axis, spans, SHARE_COLORS), legend=legend))
    return plots


def _parts(own: Sequence[Interval]) -> list[Sequence[Interval]]:
    """The intervals in MOST_SPANS parts at most."""
    size = -(-len(own) // MOST_SPANS)
    return [own[first : first + size] for first in range(0, len(own), size)]


def _share_legend(seconds: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(color, share.replace("_", " ")) for share, color in SHARE_COLORS.items() if seconds.get(share, 0) > 0]


# Where the time went


def _account(run: Run) -> Section:
    of_workers = run.accounts
    whole = total(of_workers.values())
    if whole.goodput is None:
        return Section(title="Where the time went")
    shown = dict(list(of_workers.items())[:MOST_WORKERS])
    bars = draw_bars({f"worker {worker}": account.seconds for worker, account in shown.items()}, SHARE_COLORS)
    rows = [
        [
            Cell(share.replace("_", " "), color=SHARE_COLORS.get(share, "")),
            Cell(f"{seconds / whole.wall_seconds:.1%}", seconds),
            Cell(f"{seconds:,.1f}", seconds),
            Cell(ALL_SHARES.get(share, "")),
        ]
        for share, seconds in whole.seconds.items()
    ]
    workers = f" of {count_text(len(of_workers), 'worker')}" if len(of_workers) > 1 else ""
    left_out = len(of_workers) - len(shown)
    return Section(
        title="Where the time went",
        text=f"Goodput {whole.goodput:.1%}: the part of the wall clock{workers}, over all starts and the time between "
        "them, that went into steps that counted.",
        plots=[Plot(title="By worker", figure=bars, note=f"{left_out} more workers not shown" if left_out else "")],
        tables=[Table(title="Shares", names=("share", "part", "seconds", "what it is"), rows=rows)],
        is_wide=True,
    )


# What was used


def _resources(run: Run, axis: Axis) -> Section:
    workers = sorted({sample.worker for sample in run.samples})[:MOST_WORKERS]
    plots = []
    for name, (title, y_format, is_total) in VALUES.items():
        curves = {}
        for worker in workers:
            parts = []
            for process in _processes(run.samples, worker=worker):
                known = [(milliseconds(s.time), s.values[name]) for s in process if name in s.values]
                parts.append(_rates(known, per=1.0) if is_total else known)
            curve = _joined(parts)
            if curve is not None:
                curves[f"worker {worker}"] = curve
        if curves:
            plots.append(curves_plot(title, axis, curves, len(VALUES) * len(workers), y_format=y_format))
    return Section(title="Memory and utilization", text="Over time (UTC).", plots=plots)


def _processes(samples: Sequence[Sample], *, worker: int) -> Iterator[list[Sample]]:
    """A worker's samples, start by start."""
    own = (sample for sample in samples if sample.worker == worker)
    return (list(group) for _, group in itertools.groupby(own, key=lambda sample: sample.start))


def _rates(known: Sequence[tuple[float, float]], *, per: float) -> list[tuple[float, float]]:
    """What a total grew by a second, `per` times; at the end of each stretch."""
    return [
        (time, per * (value - before) / (time - earlier) * 1000)
        for (earlier, before), (time, value) in itertools.pairwise(known)
        if time > earlier and value >= before
    ]


def _joined(parts: Sequence[Sequence[tuple[float, float]]]) -> Curve | None:
    """One curve with gaps between the parts."""
    points = [point for part in parts if part for point in (*part, (part[-1][0], np.nan))][:-1]
    return Curve(*np.array(points).T) if points else None


def _some(events: Sequence[Event], most: int) -> Sequence[Event]:
    """Evenly chosen ones, the first and the last among them."""
    if len(events) <= most:
        return events
    return [events[place] for place in np.linspace(0, len(events) - 1, most).astype(int)]


# What it was


def _configuration(run: Run) -> Section:
    rows = [[Cell(name), Cell(value), Cell("stated")] for name, value in run.given.items()]
    rows += [[Cell(name), Cell(value), Cell("default")] for name, value in run.defaults.items()]
    title = f"{len(run.given)} settings stated, {len(run.defaults)} defaults used"
    tables = [Table(title=title, names=("setting", "value", "from"), rows=rows, is_folded=True)] if rows else []
    return Section(title="Configuration", tables=tables, code=run.config)


def _environment(run: Run) -> Section:
    hardware, versions = run.result.get("hardware", {}), run.result.get("versions", {})
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
    lost = sum(int(start.get("lost_steps", 0)) for start in run.starts)
    facts |= {"steps done again": f"{lost:,}"} if lost else {}
    facts |= {name: number_text(value) for name, value in run.metrics.items()}
    return [(name, str(text)) for name, text in facts.items() if text is not None]


def notes_of(run: Run) -> list[str]:
    """What the figures of the run depend on."""
    best = run.result.get("best")
    notes = [f"Best {best['metric']}: {number_text(best['value'])} at step {best['step']:,}."] if best else []
    notes += [str(note) for note in run.result.get("notes", ())]
    failed = next((event for event in reversed(run.events) if event.name in ENDS), None)
    if failed is not None and not run.result:
        notes.append(f"{ENDS[failed.name]}: {_sentence(failed)}")
    if run.unreadable:
        notes.append(f"{count_text(run.unreadable, 'line')} of its logs could not be read and are missing here.")
    return notes
