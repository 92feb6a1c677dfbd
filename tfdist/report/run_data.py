"""A run as its directory shows it, at any moment of it: what a report is made of.

Invariant: only reads; whatever is missing or half written is left out. `read_run` alone knows the files. A curve's
steps grow, and of a step that is logged twice, as after a restart, the later point counts.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.errors import build_user_error
from tfdist.storage import files
from tfdist.telemetry.account import goodput
from tfdist.telemetry.account.goodput import Account, sum_accounts
from tfdist.telemetry.facts import Event, Sample
from tfdist.telemetry.records import Unreadable, load_if_whole, read_events, read_lines, read_samples
from tfdist.telemetry.result import RunResult, Start, Starts, read_end
from tfdist.telemetry.run_directory import RunDirectory

DONE, RUNNING, UNFINISHED = "done", "running", "unfinished"
# The status that an event gives to a run, until it is started again.
ENDS = {"run_failed": "failed", "preempted": "preempted", "left_unsaved": "left unsaved", "run_paused": "paused"}
# Samples are stored every ten seconds, half a minute later on gs://, and of a long run every 360th of its time.
SILENCE_SECONDS, SILENCE_SHARE = 90.0, 1 / 200
BEGIN = "training_started"
LEARNING_RATE, GRADIENT_NORM = "learning_rate", "gradient_norm"  # curves that are no metrics
_STATEMENT = re.compile(r"(\S+) = ")


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values at steps; NaN where there was no number."""

    steps: np.ndarray
    values: np.ndarray

    def downsample(self, most: int) -> Curve:
        """About `most` points, the highest and the lowest of each stretch among them, so that no spike is lost."""
        count = len(self.steps)
        if count <= most:
            return self
        is_number = np.isfinite(self.values)
        lowest, highest = np.where(is_number, self.values, np.inf), np.where(is_number, self.values, -np.inf)
        kept = {0, count - 1}
        for first, last in itertools.pairwise(np.linspace(0, count, most // 2 + 1).astype(int)):
            kept |= {int(first + lowest[first:last].argmin()), int(first + highest[first:last].argmax())}
        indices = sorted(kept)
        return Curve(self.steps[indices], self.values[indices])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """The contents of a run's files.

    Attributes:
      path: the run directory, local or gs://.
      stated: the settings that were stated, by the names of config.gin, as text.
      defaults: those that the run has used and nobody stated; known at its end.
      result: result.json, unless it is damaged or the run was started again since; else None.
      starts: of run.json.
      curves: by metric and split.
      events: by time.
      samples: each worker's in its order.
      unreadable: lines that nobody can read.
    """

    path: str
    config: str
    stated: Mapping[str, str]
    defaults: Mapping[str, str]
    result: RunResult | None
    starts: Sequence[Start]
    curves: Mapping[tuple[str, str], Curve]
    events: Sequence[Event]
    samples: Sequence[Sample]
    unreadable: int

    @property
    def settings(self) -> dict[str, str]:
        return {**self.defaults, **self.stated}

    def status(self, now: datetime.datetime) -> str:
        """DONE, one of ENDS, RUNNING where something was logged lately; else UNFINISHED."""
        if self.result is not None:
            return self.result.status
        for event in reversed(self.events):
            if event.name in ENDS:
                return ENDS[event.name]
            if event.name == BEGIN:
                break
        last, seconds = self.last_update, self.wall_seconds
        if last is None or seconds is None:
            return UNFINISHED
        return RUNNING if (now - last).total_seconds() < SILENCE_SECONDS + seconds * SILENCE_SHARE else UNFINISHED

    @property
    def began(self) -> datetime.datetime | None:
        """The earliest time of an event or sample."""
        return min([*(e.time for e in self.events[:1]), *(s.time for s in self.samples)], default=None)

    @property
    def last_update(self) -> datetime.datetime | None:
        """The latest time of an event or sample."""
        return max([*(e.time for e in self.events[-1:]), *(s.time for s in self.samples)], default=None)

    @property
    def wall_seconds(self) -> float | None:
        """The seconds of all starts and between them, as goodput counts them; without samples, between events."""
        if self.accounts:
            return max(account.wall_seconds for account in self.accounts.values())
        began, last = self.began, self.last_update
        return None if began is None or last is None else (last - began).total_seconds()

    @property
    def steps(self) -> int:
        """The last step that any file names."""
        known = [curve.steps[-1] for curve in self.curves.values()]
        known += [event.step for event in self.events if event.step is not None]
        return max(known, default=0) if self.result is None else self.result.steps

    def fact(self, name: str) -> Any:
        """A field of result.json, else a detail of the last start's event; None where neither has it."""
        if (value := getattr(self.result, name, None)) is not None:
            return value
        details = (event.details for event in reversed(self.events) if event.name == BEGIN and name in event.details)
        return next(details, {}).get(name)

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics, evaluations' under "val_…"; of half a run the newest."""
        newest = {
            f"{prefix}{metric}": float(curve.values[-1])
            for kind, prefix in (("train", ""), ("eval", "val_"))
            for (metric, split), curve in self.curves.items()
            if split == kind and is_metric(metric)
        }
        if self.result:
            newest |= _numbers(self.result.train_metrics, "") | _numbers(self.result.eval_metrics, "val_")
        return newest

    @functools.cached_property
    def accounts(self) -> dict[int, Account]:
        """The account of each worker's wall clock."""
        return goodput.compute_accounts(self.samples, self.starts)

    @property
    def goodput(self) -> float | None:
        """Goodput of the run; None where nothing was sampled."""
        return sum_accounts(self.accounts.values()).goodput


def is_metric(name: str) -> bool:
    """Whether a curve is about what is learned, and not about how."""
    return name not in (LEARNING_RATE, GRADIENT_NORM)


def read_run(run_dir: str) -> RunData:
    """Reads a run directory, local or gs://.

    Raises:
      UserError: no run has written there.
    """
    directory = RunDirectory(run_dir)
    if not any(files.exists(path) for path in (directory.starts, directory.events, directory.metrics)):
        raise build_user_error(
            f"{run_dir!r} holds no run: there is no run.json, events.jsonl or metrics.jsonl. Write the --run_dir of a "
            f"training, or --list {run_dir} for the runs below a directory.",
            error_id="missing-run",
        )
    unreadable = Unreadable()
    config = files.read(directory.config).decode(errors="replace") if files.exists(directory.config) else ""
    stated, defaults = _parse_settings(config)
    starts = record.starts if (record := load_if_whole(directory.starts, Starts)) is not None else ()
    return RunData(
        path=directory.path,
        config=config,
        stated=stated,
        defaults=defaults,
        result=read_end(directory),
        starts=starts,
        curves=_read_curves((directory.metrics, directory.followed), unreadable),
        events=read_events(directory, unreadable),
        samples=read_samples(directory, unreadable),
        unreadable=unreadable.lines,
    )


def _parse_settings(config: str) -> tuple[dict[str, str], dict[str, str]]:
    """Parses what config.gin states, and the defaults that it lists; a value may go on in indented lines."""
    stated: dict[str, str] = {}
    defaults: dict[str, str] = {}
    into, name = stated, ""
    for line in config.splitlines():
        statement = _STATEMENT.match(line)
        if line.startswith("# "):
            into = defaults if line.endswith(": defaults that the run has used") else stated
        elif statement is not None:
            name = statement[1]
            into[name] = line[statement.end() :]
        elif name and line.startswith(" "):
            into[name] += " " + line.strip()
    return stated, defaults


def _read_curves(paths: Sequence[str], unreadable: Unreadable) -> dict[tuple[str, str], Curve]:
    """The curves by metric and split; a metric that is an array of numbers has none."""
    points: dict[tuple[str, str], dict[int, float]] = {}
    for line in itertools.chain.from_iterable(read_lines(path, unreadable) for path in paths):
        step, split = line.get("step"), line.get("split")
        if not isinstance(step, int) or not isinstance(split, str):
            unreadable.lines += 1
            continue
        for name, value in line.items():
            number = None if name in ("step", "epoch", "split") else _number(value)
            if number is not None:
                points.setdefault((name, split), {})[step] = number
    return {
        key: Curve(np.array([step for step, _ in curve]), np.array([value for _, value in curve]))
        for key, curve in ((key, sorted(own.items())) for key, own in points.items())
    }


def _number(value: Any) -> float | None:
    """A metric's value; the log writes what JSON has no number for as "nan", "inf" and "-inf"."""
    if isinstance(value, str):
        return math.nan if value in ("nan", "inf", "-inf") else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": float(value) for name, value in values.items() if isinstance(value, int | float)}
