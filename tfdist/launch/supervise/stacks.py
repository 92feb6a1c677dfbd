"""Asks workers for their Python stacks, summarizes them for the terminal, and stores them in the run directory.

Invariant: asking waits a moment and no longer; a worker that is stopped or does not answer is said to be so.
"""

from __future__ import annotations

import datetime
import itertools
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tfdist.launch.processes import Worker
from tfdist.launch.supervise.hangs import MAX_NAMED, Vital
from tfdist.telemetry import heartbeat

ANSWER_SECONDS = 1.0
SETTLE_SECONDS = 0.05  # an answer that has not grown for so long is whole
MAX_THREADS, MAX_FRAMES = 8, 12
INPUT_MARKS = ("tensorflow/python/ops/script_ops.py",)  # on the way from a pipeline into Python


def collect_stacks(workers: Sequence[Worker], vitals: Sequence[Vital]) -> dict[int, str]:
    """Has workers write their stacks by `faulthandler`, and waits; returns those of each that answered."""
    asked = {v.worker for v in vitals if v.shows_stacks and not v.is_stopped}
    files = {w.index: heartbeat.stacks_path(w.heartbeat) for w in workers if w.index in asked}
    begins = {worker: _measure_size(path) for worker, path in files.items()}
    for worker in workers:
        if worker.index in asked:
            worker.send(heartbeat.STACKS_SIGNAL)
    give_up = time.monotonic() + ANSWER_SECONDS
    sizes, stable_since = dict(begins), time.monotonic()
    while files and time.monotonic() < give_up:
        time.sleep(0.01)
        grown = {worker: _measure_size(path) for worker, path in files.items()}
        if grown != sizes:
            sizes, stable_since = grown, time.monotonic()
        elif all(sizes[w] > begins[w] for w in sizes) and time.monotonic() - stable_since > SETTLE_SECONDS:
            break
    answers = {w: _read(path)[begins[w] :].decode(errors="replace") for w, path in files.items()}
    return {worker: text for worker, text in answers.items() if text}


def format_stacks(vitals: Sequence[Vital], stacks: Mapping[int, str], *, stalled: Collection[int], now: float) -> str:
    """Formats workers' positions: stalled ones first, with their stacks, and at most MAX_NAMED others."""
    lines: list[str] = []
    shown: dict[str, int] = {}  # who has which stacks
    for vital in vitals:
        if vital.worker in stalled:
            lines += [
                f"{vital.name}: {vital.describe_position(now)}",
                *(f"    {line}" for line in _stack_lines(vital, stacks, shown)),
            ]
    others = [vital for vital in vitals if vital.worker not in stalled]
    lines += [f"worker {vital.worker}: {vital.describe_position()}" for vital in others[:MAX_NAMED]]
    return "\n".join(lines + ([f"{len(others) - MAX_NAMED:,} more workers"] if len(others) > MAX_NAMED else []))


def _stack_lines(vital: Vital, stacks: Mapping[int, str], shown: dict[str, int]) -> list[str]:
    """The stacks of a worker, in short, or why there are none; adds them to `shown`."""
    if vital.worker in stacks:
        lines = _shorten(stacks[vital.worker])
        first = shown.setdefault("\n".join(lines), vital.worker)
        return lines if first == vital.worker else [f"its stacks are those of worker {first}"]
    why = "it is stopped" if vital.is_stopped else "it did not answer"
    return [f"its stacks cannot be shown: {why}"] if vital.is_stopped or vital.shows_stacks else []


def store(run_dir: str, *, cause: int, vitals: Sequence[Vital], stacks: Mapping[int, str], now: float) -> str | None:
    """Writes the whole stacks into a file of the run directory; returns its path, None where the run has made none.

    Args:
      cause: the worker that failed or hangs.

    Raises:
      OSError, UserError: it could not be written.
    """
    from tfdist.storage import files
    from tfdist.telemetry.run_directory import RunDirectory

    if not files.is_dir(run_dir):
        return None
    directory = RunDirectory(run_dir)
    path = directory.stacks(cause, datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S"))
    files.make_dirs(directory.telemetry)
    files.write_atomic(
        path, "\n".join(f"{v.name}: {v.describe_position(now)}\n\n{stacks.get(v.worker, '')}" for v in vitals)
    )
    return path


def is_input_blocked(stack: str) -> bool:
    """Whether a thread of the input pipeline is in the middle of Python code."""
    return any(mark in thread for thread in _threads(stack)[1:] for mark in INPUT_MARKS)


def _threads(stack: str) -> list[str]:
    """The stack of each thread, the main one in front; `faulthandler` begins with the newest."""
    blocks = [block for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)|\n\n", stack.strip()) if block.strip()]
    return blocks[::-1]


def _shorten(stack: str) -> list[str]:
    """The innermost frames of each thread; of a library's that follow one another the first alone."""
    lines: list[str] = []
    for thread in _threads(stack)[:MAX_THREADS]:
        head, *frames = thread.splitlines()
        lines.append("main thread:" if not lines else re.sub(r" 0x[0-9a-f]+.*", ":", head.replace("Current t", "T")))
        groups = [(library, list(group)) for library, group in itertools.groupby(frames, key=_library)]
        shortened = [frame.rstrip() for library, group in groups for frame in (group[:1] if library else group)]
        lines += shortened[:MAX_FRAMES]
    return lines


def _library(frame: str) -> str:
    """The installed package that a frame belongs to; empty for all other code."""
    match = re.search(r"/(?:site|dist)-packages/([^/\"]+)", frame)
    return match[1] if match else ""


def _measure_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
