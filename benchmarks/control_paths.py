"""What tfdist itself has to do for each member of a run, with many members.

No member trains: a member is a thread or a file that says what a worker would say, and what is timed is tfdist's own
code on the side that talks to all of them. `ours` is with --members, `peer` with a quarter of them. A ratio of 4 is a
cost that grows as the members do, 16 one that grows with their square. Objects go to the tests' Cloud Storage over HTTP
on this machine, so there the requests count and not the seconds.

    python benchmarks/control_paths.py [--json=FILE] [--part=PART] [--members=1024] [--rounds=3]
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
from emulator import BUCKET, emulator
from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples, time_call

from tfdist.checkpoint import catalog, restore
from tfdist.checkpoint.format.tensor_files import TensorSpec, plan_files
from tfdist.checkpoint.write.snapshot import HostBuffer
from tfdist.checkpoint.write.writer import Part, Snapshot, write_checkpoint
from tfdist.errors import InUseError
from tfdist.launch.processes import Worker
from tfdist.launch.supervise.hangs import Deadlines, Watcher, read_vitals
from tfdist.storage import files as stored
from tfdist.storage import lease
from tfdist.telemetry import heartbeat
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.run_directory import RunDirectory

PARTS = ("watching", "files", "bucket")
MOST_GROWTH = 6.0  # with four times as many members; 4 is linear
ANSWER_SECONDS = 0.0005  # of a server on the same network

Sample = Callable[[int], Mapping[str, float]]  # with so many members: seconds, or requests, by what they were for


def measure(parts: Sequence[str], *, members: int, rounds: int) -> list[Figure]:
    return [figure for part in parts for figure in measure_part("control_paths", part, members, rounds)]


def measure_growth(sample: Sample, members: str, rounds: str) -> list[Figure]:
    """Each of a sample's numbers with all members, beside that with a quarter of them."""
    found: list[list[Mapping[str, float]]] = [[], []]

    def one(side: int, count: int) -> Callable[[], float]:
        def take() -> float:
            found[side].append(sample(count))
            return 0.0

        return take

    take_samples([one(0, int(members)), one(1, int(members) // 4)], int(rounds))
    return [
        make_ratio(
            name,
            *([each[name] for each in side] for side in found),
            MOST_GROWTH,
            unit="requests" if name.endswith("requests") else "s",
            at_most=True,
        )
        for name in found[0][0]
    ]


# Watching


class Member(Worker):
    """A worker that runs, as the launcher sees it."""

    def __init__(self, index: int, directory: Path) -> None:
        self.index, self.heartbeat = index, directory / f"{index}.heartbeat"

    @property
    def pid(self) -> int:
        return os.getpid()

    def poll(self) -> None:
        return None

    def send(self, signal_number: int) -> None:
        pass


def watching(members: str, rounds: str) -> list[Figure]:
    from tensorflow.python.eager import context

    from tfdist.strategies import multi_worker

    def answer(task: str, timeout_in_ms: int) -> None:
        time.sleep(ANSWER_SECONDS)

    def sample(count: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
            workers = [Member(index, Path(directory)) for index in range(count)]
            heartbeat.Heartbeat(str(workers[0].heartbeat)).beat(heartbeat.TRAINING, 7)
            for worker in workers[1:]:
                shutil.copyfile(workers[0].heartbeat, worker.heartbeat)
            watcher = Watcher(Deadlines())
            looked = time_call(lambda: watcher.find(read_vitals(workers), time.monotonic()))
        tasks = [f"/job:worker/replica:0/task:{index}" for index in range(1, count)]
        with mock.patch.object(context.context(), "check_collective_ops_peer_health", answer):
            asked = time_call(lambda: multi_worker._ask_until_one_died(tasks, Once()))
        return {
            "a launcher's look at all workers": looked,
            f"worker 0 asks all servers, {ANSWER_SECONDS * 1e3:g} ms each": asked,
        }

    return measure_growth(sample, members, rounds)


class Once(threading.Event):
    """Lets one round pass."""

    rounds = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.rounds += 1
        return self.rounds > 1


# Files and objects


def files(members: str, rounds: str) -> list[Figure]:
    def sample(count: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as directory:
            return measure_files(directory, count, lambda: 0)

    return measure_growth(sample, members, rounds)


def bucket(members: str, rounds: str) -> list[Figure]:
    numbers = itertools.count()
    with emulator() as count_requests:

        def sample(count: int) -> dict[str, float]:
            return measure_files(f"gs://{BUCKET}/{next(numbers)}", count, count_requests)

        return measure_growth(sample, members, rounds)


def measure_files(directory: str, count: int, count_requests: Callable[[], int]) -> dict[str, float]:
    """What the files of a run with so many workers cost; in a bucket, in requests too."""
    kind = "gs://, " if stored.is_remote(directory) else ""
    path = f"{directory}/step-{7:012d}-a10000"
    events = RunDirectory(f"{directory}/run")
    stored.make_dirs(events.path)
    found: dict[str, float] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        before = count_requests()
        found[f"{kind}{name}"] = time_call(act)
        if kind:
            found[f"{kind}{name}, requests"] = count_requests() - before

    with ThreadPoolExecutor(16) as threads:
        note(
            "all other workers' parts written, 16 at once",
            lambda: list(threads.map(write_part, *list_parts(path, count))),
        )
    note("the chief's commit of all parts", lambda: write_part(path, Part(0, count, "a1")))
    note("restore and check of all parts", lambda: restore.load(path))
    note("removal of that checkpoint", lambda: catalog.remove(path))
    note("each worker's first event", lambda: [tell_event(events, index) for index in range(1, count)])
    note("a listing of the run directory", lambda: stored.list_names(events.path))
    if not kind:
        note("a lease refused to all others", lambda: refuse_others(directory, count))
    return found


def list_parts(path: str, count: int) -> tuple[list[str], list[Part]]:
    return [path] * (count - 1), [Part(index, count, "a1") for index in range(1, count)]


def write_part(path: str, part: Part) -> None:
    spec = TensorSpec(f"tensor_{part.index}", np.dtype("float32"), (64,))
    buffer = HostBuffer(plan_files([spec], max_file_bytes=1 << 20))
    write_checkpoint(
        path,
        Snapshot(7, buffer, {}, {}),
        identity={},
        still_ours=lambda: None,
        part=part,
    )


def tell_event(directory: RunDirectory, worker: int) -> None:
    log = EventLog(directory, worker=worker, console=Console())
    log.info("started", step=0)
    log.close()


def refuse_others(directory: str, count: int) -> None:
    held = lease.acquire(directory, owner="a training", notify=lambda message: None)
    for _ in range(1, count):
        with contextlib.suppress(InUseError):
            lease.acquire(directory, owner="another", notify=lambda message: None, wait_seconds=0.0)
    held.release()


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"members": choose_size(1024, 8), "rounds": 3})
