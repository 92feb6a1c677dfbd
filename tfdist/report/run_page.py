"""The sections of the page of one run.

Invariant: a section that has nothing to show is empty, so that half a run has a page, too. Each worker has a figure or
a line of its own, up to MAX_WORKERS of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from bokeh.palettes import Category10_10, Dark2_8

from tfdist.report.figures import STEPS, TIME, Axis, draw_bars, draw_curves, draw_points, to_milliseconds
from tfdist.report.page import Cell, PageTable, Plot, Section
from tfdist.report.run_data import BEGIN, ENDS, GRADIENT_NORM, LEARNING_RATE, Curve, RunData, is_metric
from tfdist.telemetry.account.goodput import ALL_SHARES, split_by_process, sum_accounts
from tfdist.telemetry.console.console_text import count_text, duration_text, number_text
from tfdist.telemetry.facts import Event

MAX_WORKERS = 16
MAX_EVENTS = 500  # the newest
EVENT_NAMES = 130  # pixels
UNSHOWN_EVENTS = ("input_wait",)  # which comes every epoch
LEVEL_COLORS = {"info": "#4c8dd6", "warning": "#e08a1e", "error": "#d6453d"}
SHARE_COLORS = dict(zip(ALL_SHARES, (*Category10_10, *Dark2_8), strict=False))
# What samples hold: title, format of its axis, and whether it is a total, whose growth is shown.
VALUES = {
    "host_memory_bytes": ("Memory of the host's process", "0.[00] d", False),
    "device_memory_bytes": ("Device memory in use", "0.[00] d", False),
    "device_memory_peak_bytes": ("Device memory, peak", "0.[00] d", False),
    "cpu_utilization": ("CPU, of the process's cores", "0.[0]%", False),
    "gpu_utilization": ("GPU", "0.[0]%", False),
    "network_sent_bytes": ("Network, sent a second", "0.[00] d", True),
    "network_received_bytes": ("Network, received a second", "0.[00] d", True),
    "storage_written_bytes": ("Storage, written a second", "0.[00] d", True),
    "storage_read_bytes": ("Storage, read a second", "0.[00] d", True),
}


def summarize_run(run: RunData, status: str) -> list[tuple[str, str]]:
    """The facts on top of the page."""
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


def list_notes(run: RunData) -> list[str]:
    """The best value, how a run that failed ended, and what could not be read."""
    notes: list[str] = []
    if run.result is not None:
        best = run.result.best
        if best and best.keys() >= {"metric", "value", "step"}:
            notes.append(f"Best {best['metric']}: {number_text(float(best['value']))} at step {best['step']:,}.")
        notes += [
            f"Target {'met' if each['met'] else 'missed'}: {name} {number_text(each['measured'])}, with "
            f"{number_text(each['target'])} planned."
            for name, each in run.result.performance_targets.items()
        ]
        notes += run.result.notes
    end = next((event for event in reversed(run.events) if event.name in ENDS), None)
    if end is not None and not run.result:
        notes.append(f"{ENDS[end.name].capitalize()} at {end.time:%H:%M:%S}: {_message(end) or end.name}")
    if run.unreadable:
        notes.append(f"{count_text(run.unreadable, 'line')} of its logs could not be read and are missing here.")
    return notes


def build_sections(run: RunData) -> list[Section]:
    """The sections of one run's page, empty ones among them."""
    begins = [to_milliseconds(event.time) for event in run.events if event.name == BEGIN][1:]
    return [
        _curves(run),
        _timeline(run, Axis(TIME, lines=begins, left=EVENT_NAMES)),
        _account(run),
        _resources(run, Axis(TIME, lines=begins)),
        _configuration(run),
        _environment(run),
    ]


def _curves(run: RunData) -> Section:
    axis = Axis(STEPS, lines=[float(start.step) for start in run.starts[1:]])
    by_metric: dict[str, dict[str, Curve | None]] = {}
    for (metric, split), curve in sorted(run.curves.items(), key=lambda item: item[0][1] != "train"):
        if is_metric(metric):
            by_metric.setdefault(metric, {})[split] = curve
    rates = [run.curves[LEARNING_RATE, split] for split in ("train", "eval") if (LEARNING_RATE, split) in run.curves]
    by_metric |= {"learning rate": {"learning rate": rates[0]}} if rates else {}
    norm = run.curves.get((GRADIENT_NORM, "train"))
    by_metric |= {"norm of the gradient, before clipping": {"train": norm}} if norm else {}
    plots = [draw_curves(metric, axis, curves) for metric, curves in by_metric.items()]
    return Section(title="Curves", text="Dashed: where a start resumed." if len(run.starts) > 1 else "", plots=plots)


def _timeline(run: RunData, axis: Axis) -> Section:
    """Events and throughput, along one axis."""
    shown = [event for event in run.events if event.name not in UNSHOWN_EVENTS]
    newest, plots, tables = shown[-MAX_EVENTS:], [], []
    if newest:
        names = [event.name.replace("_", " ") for event in newest]
        texts = [f"{event.time:%H:%M:%S}  {_message(event) or event.name}" for event in newest]
        colors = [LEVEL_COLORS[event.level] for event in newest]
        points = list(zip((to_milliseconds(event.time) for event in newest), names, colors, texts, strict=True))
        rows = list(dict.fromkeys(names))[::-1]
        figure = draw_points(points, axis, height=80 + 24 * len(rows), y_range=rows)
        note = f"the newest {len(newest)} of {len(shown)}" if len(newest) < len(shown) else ""
        plots.append(Plot(title="Events", figure=figure, note=note))
        tables.append(_event_table(newest))
    plots += _throughput(run, axis)
    text = "Over time (UTC)." + (" Dashed: where a start began." if len(run.starts) > 1 else "")
    return Section(title="What happened", text=text, plots=plots, tables=tables, is_wide=True)


def _message(event: Event) -> str:
    details = event.details
    listed = ", ".join(f"{name} {value}" for name, value in details.items())
    return str(event.message or details.get("reason") or listed)


def _event_table(events: Sequence[Event]) -> PageTable:
    rows = [
        [
            Cell(f"{event.time:%Y-%m-%d %H:%M:%S}"),
            Cell(event.name, color=LEVEL_COLORS[event.level]),
            Cell("" if event.worker is None else str(event.worker), event.worker),
            Cell("" if event.step is None else f"{event.step:,}", event.step),
            Cell(_message(event)),
        ]
        for event in events
    ]
    names = ("time", "event", "worker", "step", "what")
    return PageTable(title=f"{len(events)} events", names=names, rows=rows, is_folded=True)


def _throughput(run: RunData, axis: Axis) -> list[Plot]:
    """Throughput of the whole run, by its chief's steps; none where nothing was sampled."""
    batch = run.fact("global_batch_size") or run.settings.get("train.global_batch_size", "")
    examples = int(batch) if str(batch).isdigit() else None
    unit = "steps" if examples is None else "examples"
    processes = split_by_process(run.samples).get(0, [])
    steps = [[(to_milliseconds(s.time), float(s.step)) for s in own if s.step is not None] for own in processes]
    curve = _join([_rates(known, per=float(examples or 1)) for known in steps])
    title = f"Throughput, {unit} a second"
    return [] if curve is None else [draw_curves(title, axis, {unit: curve}, y_format="0,0.[00]")]


def _account(run: RunData) -> Section:
    """The wall clock of each worker over all starts, and goodput."""
    whole = sum_accounts(run.accounts.values())
    if whole.goodput is None:
        return Section(title="Where the time went")
    shown = {f"worker {worker}": account.seconds for worker, account in list(run.accounts.items())[:MAX_WORKERS]}
    rows = [
        [
            Cell(share.replace("_", " "), color=SHARE_COLORS.get(share, "")),
            Cell(f"{seconds / whole.wall_seconds:.1%}", seconds),
            Cell(f"{seconds:,.1f}", seconds),
            Cell(ALL_SHARES.get(share, "")),
        ]
        for share, seconds in whole.seconds.items()
    ]
    workers = f" of {count_text(len(run.accounts), 'worker')}" if len(run.accounts) > 1 else ""
    return Section(
        title="Where the time went",
        text=f"Goodput {whole.goodput:.1%}: the part of the wall clock{workers}, over all starts and the time between "
        "them, that went into steps that counted.",
        plots=[Plot(title="By worker", figure=draw_bars(shown, SHARE_COLORS))],
        tables=[PageTable(title="Shares", names=("share", "part", "seconds", "what it is"), rows=rows)],
        is_wide=True,
    )


def _resources(run: RunData, axis: Axis) -> Section:
    """Memory, utilization and traffic, a line a worker."""
    by_worker = list(split_by_process(run.samples).items())[:MAX_WORKERS]
    plots = []
    for name, (title, y_format, is_total) in VALUES.items():
        curves = {}
        for worker, processes in by_worker:
            known = [[(to_milliseconds(s.time), s.values[name]) for s in own if name in s.values] for own in processes]
            curves[f"worker {worker}"] = _join([_rates(own, per=1.0) for own in known] if is_total else known)
        if any(curve is not None and np.nanmax(curve.values, initial=0.0) > 0 for curve in curves.values()):
            plots.append(draw_curves(title, axis, curves, y_format=y_format))
    return Section(title="Memory and utilization", text="Over time (UTC).", plots=plots)


def _rates(known: Sequence[tuple[float, float]], *, per: float) -> list[tuple[float, float]]:
    """The growth of a total a second, times `per`; at the end of each stretch."""
    return [
        (time, per * (value - before) / (time - earlier) * 1000)
        for (earlier, before), (time, value) in itertools.pairwise(known)
        if time > earlier and value >= before
    ]


def _join(parts: Sequence[Sequence[tuple[float, float]]]) -> Curve | None:
    """One curve with gaps between the parts."""
    points = [point for part in parts if part for point in (*part, (part[-1][0], np.nan))][:-1]
    return Curve(*np.array(points).T) if points else None


def _configuration(run: RunData) -> Section:
    rows = [[Cell(name), Cell(value), Cell("stated")] for name, value in run.stated.items()]
    rows += [[Cell(name), Cell(value), Cell("default")] for name, value in run.defaults.items()]
    title = f"{len(run.stated)} settings stated, {len(run.defaults)} defaults used"
    tables = [PageTable(title=title, names=("setting", "value", "from"), rows=rows, is_folded=True)] if rows else []
    return Section(title="Configuration", tables=tables, code=run.config, code_title="config.gin")


def _environment(run: RunData) -> Section:
    hardware, versions = (run.result.hardware, run.result.versions) if run.result is not None else ({}, {})
    facts = [(name, str(version)) for name, version in versions.items()]
    facts += [(f"{kind} devices", str(count)) for kind, count in hardware.get("devices", {}).items()]
    facts += [("accelerator", name) for name in hardware.get("accelerators", {})]
    facts += [("CPUs", str(hardware["cpus"]))] if "cpus" in hardware else []
    return Section(title="Environment", facts=facts)
