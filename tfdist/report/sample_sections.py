"""What the samples of a run's processes show: throughput, where the time went, what was used.

Invariant: each worker has a figure or a line of its own, up to MOST_WORKERS of them; the account says how many more
there are. `run_sections.py` puts them on the page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tfdist.report.curves import Curve
from tfdist.report.figures import Axis, curves_plot, draw_bars, draw_shares, milliseconds
from tfdist.report.page import Cell, Plot, Section, Table
from tfdist.report.run_data import Run
from tfdist.report.words import count_text
from tfdist.telemetry.account.goodput import ALL_SHARES, Interval, total
from tfdist.telemetry.facts import Sample

MOST_WORKERS = 16
MOST_SPANS = 150  # of time, in which a worker's shares are shown
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
    "cpu_utilization": ("CPU, of the process's cores", "0.[0]%", False),
    "gpu_utilization": ("GPU", "0.[0]%", False),
    "network_sent_bytes": ("Network, sent a second", "0.[00] d", True),
    "network_received_bytes": ("Network, received a second", "0.[00] d", True),
    "storage_written_bytes": ("Storage, written a second", "0.[00] d", True),
    "storage_read_bytes": ("Storage, read a second", "0.[00] d", True),
}


def throughput(run: Run, axis: Axis) -> list[Plot]:
    """Of the whole run, as its chief's steps tell; none where nothing was sampled."""
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


def shares_over_time(run: Run, axis: Axis) -> list[Plot]:
    """A figure for each worker."""
    of_workers = run.intervals
    plots = []
    for worker, own in list(of_workers.items())[:MOST_WORKERS]:
        spans = [(milliseconds(part[0].begin), milliseconds(part[-1].end), total(part).seconds) for part in _parts(own)]
        name = f"Worker {worker}" if len(of_workers) > 1 else "Where the time went"
        legend = share_legend(total(run.accounts.values()).seconds) if worker == min(of_workers) else []
        plots.append(Plot(title=name, figure=draw_shares(axis, spans, SHARE_COLORS), legend=legend))
    return plots


def _parts(own: Sequence[Interval]) -> list[Sequence[Interval]]:
    """The intervals in MOST_SPANS parts at most."""
    size = -(-len(own) // MOST_SPANS)
    return [own[first : first + size] for first in range(0, len(own), size)]


def share_legend(seconds: Mapping[str, float]) -> list[tuple[str, str]]:
    """The colors of the shares that took any time."""
    return [(color, share.replace("_", " ")) for share, color in SHARE_COLORS.items() if seconds.get(share, 0) > 0]


def account(run: Run) -> Section:
    """The wall clock of each worker over all starts, and goodput."""
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


def resources(run: Run, axis: Axis) -> Section:
    """Memory, utilization and traffic, a line a worker."""
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
