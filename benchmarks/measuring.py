"""Ratios of things measured side by side: interleaved samples, medians, a table, a JSON file.

Invariant: a ratio is the median of ratios of samples that were taken right after one another, so that what else happens
on the machine weighs on both sides alike. Used by every benchmark. Imports the standard library alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).resolve().parent
SMOKE = "TFDIST_BENCHMARK_SMOKE"  # in the environment of every process of a benchmark that is started with --smoke
if "--smoke" in sys.argv:
    os.environ[SMOKE] = "1"  # here already: modules choose their sizes when they are imported
NOT_INSTALLED = 69  # exit status of a part whose peer is not installed, EX_UNAVAILABLE of <sysexits.h>
HEADINGS = ("figure", "ours", "peer", "unit", "ratio", "middle half", "rounds", "goal", "")


Value = TypeVar("Value")


def choose_size(full: Value, smoke: Value) -> Value:
    """Returns `full`, or with --smoke `smoke`, the least with which there are figures."""
    return smoke if SMOKE in os.environ else full


@dataclasses.dataclass(frozen=True)
class Figure:
    """A ratio with its goal.

    Attributes:
      name: says what was divided by what.
      value: the median ratio; more is better, unless `at_most`.
      goal: the least value that is good enough, or the greatest; None for one that is only told.
      quartiles: of the rounds' ratios.
      ours: the median of what is judged, in `unit`.
      peer: the median of what it is judged against.
      unit: of `ours` and `peer`.
      at_most: whether less is better.
      value_unit: of `value` and `goal`.
      rounds: how many ratios there are; None where there is but one number.
    """

    name: str
    value: float
    goal: float | None
    quartiles: tuple[float, float]
    ours: float
    peer: float
    unit: str = "steps/s"
    at_most: bool = False
    value_unit: str = "ratio"
    rounds: int | None = None

    @property
    def met(self) -> bool:
        return self.goal is None or (self.value <= self.goal if self.at_most else self.value >= self.goal)


def time_call(act: Callable[..., object], *arguments: object) -> float:
    """The seconds that a call takes."""
    started = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - started


def take_samples(contenders: Sequence[Callable[[], Value]], rounds: int) -> list[list[Value]]:
    """Takes one sample of each contender in each round, forwards and backwards in turn; the samples by contender."""
    samples: list[list[Value]] = [[] for _ in contenders]
    for i in range(choose_size(rounds, 1)):
        for j in range(len(contenders))[:: 1 if i % 2 == 0 else -1]:
            samples[j].append(contenders[j]())
    return samples


def make_ratio(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    goal: float | None,
    *,
    unit: str = "steps/s",
    at_most: bool = False,
) -> Figure:
    """The figure of samples taken in the same rounds."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    low, value, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    medians = statistics.median(ours), statistics.median(peer)
    return Figure(name, value, goal, (low, high), *medians, unit, at_most, rounds=len(ratios))


def measure_peak(name: str, work: Callable[[], object]) -> list[Figure]:
    """What the peak of this process's memory grows by while it works, in MB."""
    before = read_peak()
    work()
    grown = read_peak() - before
    return [Figure(name, grown, None, (grown, grown), grown, grown, "MB")]


def read_peak() -> float:
    """The peak of this process's resident memory so far, since it was started.

    `ru_maxrss` would not do: a process takes it over from the one that started it.
    """
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def format_table(figures: Sequence[Figure]) -> str:
    rows = [HEADINGS, *(_format_row(figure) for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    for cells, row in zip(aligned, rows, strict=True):
        cells[0] = row[0].ljust(widths[0])
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def _format_row(figure: Figure) -> tuple[str, ...]:
    low, high = figure.quartiles
    return (
        figure.name,
        f"{figure.ours:.4g}",
        f"{figure.peer:.4g}",
        figure.unit,
        f"{figure.value:.3f}",
        f"{low:.3f}–{high:.3f}",
        str(figure.rounds or ""),
        "" if figure.goal is None else f"{'≤' if figure.at_most else '≥'} {figure.goal:g}",
        "" if figure.goal is None else ("met" if figure.met else "MISSED"),
    )


def format_json(figures: Sequence[Figure]) -> str:
    told = {f.name: {"value": f.value, "goal": f.goal, "met": f.met, "unit": f.value_unit} for f in figures}
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"


def build_environment(**more: str) -> dict[str, str]:
    """The environment of a process that imports tfdist and modules of this directory."""
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def measure_part(module: str, part: str, *arguments: object, launch: Sequence[str] = ()) -> list[Figure]:
    """What the function `part` of `module` measures, run by part.py in a process of its own, or in several.

    Args:
      module: a module of this directory.
      part: a function of it that returns figures.
      arguments: of it, passed as text.
      launch: arguments of `tfdist.launch`, to run it in several processes; the first one's figures count.

    Raises:
      SystemExit: it failed, or its peer is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        path = Path(scratch) / "figures.json"
        start = ["-m", "tfdist.launch", *launch, "--module=part", "--"] if launch else [str(HERE / "part.py")]
        command = [sys.executable, *start, module, part, str(path), *map(str, arguments)]
        status = subprocess.run(command, env=build_environment()).returncode
        if status == NOT_INSTALLED:
            sys.exit(status)  # the part has printed what is missing
        if status:
            sys.exit(f"{' '.join(command)} ended with status {status}")
        return [Figure(**{**one, "quartiles": tuple(one["quartiles"])}) for one in json.loads(path.read_text())]


def report(
    description: str,
    measure: Callable[..., Iterable[Sequence[Figure]]],
    *,
    parts: Sequence[str] = (),
    has_quick: bool = False,
    numbers: Mapping[str, int] | None = None,
) -> None:
    """The command of a benchmark: measures, prints each table as it comes and all in one, and writes --json's file.

    Args:
      description: for --help.
      measure: makes the figures, table by table; where there are `parts`, of those in the list that it is given.
      parts: of which --part chooses one.
      has_quick: whether there is --quick, which `measure` then gets as `quick`.
      numbers: options that are whole numbers, with their defaults; `measure` gets them by these names.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write {figure: {value, goal, met, unit}} there")
    if parts:
        parser.add_argument("--part", choices=parts, help="measure this alone")
    parser.add_argument("--smoke", action="store_true", help="the least rounds and sizes: shows that it starts")
    if has_quick:
        parser.add_argument("--quick", action="store_true", help="fewer and shorter samples: indicative at most")
    for name, default in (numbers or {}).items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{default:,} by default")
    given = parser.parse_args()
    chosen = [[given.part] if given.part else parts] if parts else []
    quick = {"quick": given.quick or given.smoke} if has_quick else {}
    tables = []
    for table in measure(*chosen, **{name: getattr(given, name) for name in numbers or {}}, **quick):
        print(format_table(table), flush=True)  # the whole takes long, and may be cut off
        tables.append(table)
    figures = [figure for table in tables for figure in table]
    if len(tables) > 1:
        print(format_table(figures))
    if given.json:
        Path(given.json).write_text(format_json(figures))
