"""Faults of the machine, mixed at random over what a user runs, and the judgement of each start.

A work (a training, a sweep, an export …) is started again and again in a `Scene`, which has a disk that can fill or a
bucket that can fail, until enough has befallen it; then once more in peace. Each start must end with a status that the
docs give for what befell it, and print no traceback; the last one must leave what an undisturbed work leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import psutil
import support
from crashes import hooks, runs
from crashes.kills import LOST_PEER, PREEMPTED
from crashes.pace import PACE
from crashes.runs import Run, differences
from gcs.faults import Fault as Answer
from gcs.server import GcsServer
from processes import LEFT_SECONDS, Running, as_in_shell, running
from tuning.sweeps import Sweep, arguments, write_experiment

from tfdist.errors import EXIT_NOT_SAVED, EXIT_STORE_UNAVAILABLE, EXIT_USER_ERROR

DISK, BUCKET = "disk", "bucket"
DISK_MEGABYTES = 64
MOST_LEFT = 16  # pages that a full disk still has
SHIFTS = (-400 * 86400, -86400, -30, -2, 2, 30, 3600, 400 * 86400)  # seconds
PATIENCE_SECONDS = 12.0  # a store may fail for so long without a run's end
CRASHED = ("Traceback (most recent call last)", "Fatal Python error", "terminate called", "Segmentation fault")
STOPPED = 0.3  # of starts, which a checkpoint that cannot be written ends
KILLED_PARENTS = 0.7  # of those that have forked
MOST_SECONDS = 300.0  # of a start
KEPT = ("export/model.keras", "metrics.jsonl", "result.json")  # of a training that is used
LOST_LINES = "could not be written"

Plan = dict[str, tuple[float, float]]  # by fault: when it begins, in seconds from a start, and how long it lasts


@dataclasses.dataclass
class Scene:
    """Where one work is done.

    Attributes:
      root: for logs, and what the processes are told.
      run_dir: on a small disk, or in a bucket.
      server: of the bucket.
      life: that goes on.
      orphans: forked children whose parents may have ended.
    """

    root: pathlib.Path
    run_dir: str
    server: GcsServer | None = None
    life: Running | None = None
    orphans: list[psutil.Process] = dataclasses.field(default_factory=list)

    def listeners(self) -> list[psutil.Process]:
        """The processes that train or evaluate now, the one that was started among them, if it does."""
        names = (self.root / "site").glob(f"{hooks.LISTENS}*")
        listening = {int(path.name.removeprefix(hooks.LISTENS)) for path in names}
        found = [process for process in support.find_marked(self.life.mark) if process.pid in listening]
        return sorted(found, key=lambda process: process.pid)

    def processes(self) -> list[psutil.Process]:
        """All that belong to the life, but the orphans, and what of multiprocessing waits for the end of these."""
        spared = {process.pid for process in self.orphans}
        found = []
        for process in support.find_marked(self.life.mark):
            with contextlib.suppress(psutil.Error):
                waits = bool(spared) and "from multiprocessing." in " ".join(process.cmdline())
                if process.pid not in spared and not waits:
                    found.append(process)
        return found

    def kill_all(self) -> None:
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def fetch(self) -> pathlib.Path:
        """The run directory, on a disk."""
        if self.server is None:
            return pathlib.Path(self.run_dir)
        to = self.root / "fetched"
        shutil.rmtree(to, ignore_errors=True)
        for name in self.server.buckets.names("bucket"):
            path = to / name.removeprefix("run/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.server.buckets.get("bucket", name).data)
        return to

    def put(self, directory: pathlib.Path) -> None:
        """Makes a copy of a directory the run directory."""
        if self.server is None:
            shutil.copytree(directory, self.run_dir)
            return
        for path in directory.rglob("*"):
            if path.is_file():
                name = f"run/{path.relative_to(directory)}"
                self.server.buckets.put("bucket", name, path.read_bytes())


@contextlib.contextmanager
def scene(root: pathlib.Path, kind: str | None) -> Iterator[Scene]:
    """With a disk of its own, a bucket, or (None) without anything that can fail."""
    (root / "site").mkdir(parents=True)
    hooks.set_clock(root / "site", 0)
    with contextlib.ExitStack() as stack:
        if kind == BUCKET:
            made = Scene(root, "gs://bucket/run", stack.enter_context(GcsServer("bucket")))
        else:
            made = Scene(root, str(root / DISK / "run"))
            (root / DISK).mkdir()
        if kind == DISK:
            size = f"size={DISK_MEGABYTES}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(root / DISK)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(root / DISK)], check=True)
        try:
            yield made
        finally:
            if made.life is not None:
                made.kill_all()
            end_children(made.orphans)


def can_mount(root: pathlib.Path) -> bool:
    """Whether this user may have a disk that fills."""
    with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError), scene(root / "probe", DISK):
        return True
    return False


def fill_disk(scene: Scene, dice: random.Random) -> None:
    disk = os.statvfs(scene.root / DISK)
    with (scene.root / DISK / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, max(1, disk.f_bavail - dice.randint(0, MOST_LEFT)) * disk.f_frsize)


def free_disk(scene: Scene) -> None:
    (scene.root / DISK / "ballast").unlink()


def fail_store(*answers: Answer) -> Callable[[Scene, random.Random], None]:
    return lambda scene, dice: scene.server.faults.add(*answers)


def mend_store(scene: Scene) -> None:
    scene.server.faults.clear()


def shift_clock(scene: Scene, dice: random.Random) -> None:
    hooks.set_clock(scene.root / "site", dice.choice(SHIFTS))


def mend_clock(scene: Scene) -> None:
    hooks.set_clock(scene.root / "site", 0)


def fork_child(scene: Scene, dice: random.Random) -> None:
    """Has a process fork a child that stays, and may kill the process then."""
    parent = dice.choice(scene.listeners())
    parent.send_signal(hooks.FORK)
    support.wait_until(lambda: _forked(scene) or not parent.is_running(), seconds=5)
    scene.orphans += _forked(scene)
    if dice.random() < KILLED_PARENTS:
        strike(signal.SIGKILL)(scene, dice)


def _forked(scene: Scene) -> list[psutil.Process]:
    known = {process.pid for process in scene.orphans}
    names = [path.name.removeprefix(hooks.FORKED) for path in (scene.root / "site").glob(f"{hooks.FORKED}*")]
    return [psutil.Process(int(name)) for name in names if int(name) not in known and psutil.pid_exists(int(name))]


def end_children(orphans: list[psutil.Process]) -> None:
    for process in orphans:
        with contextlib.suppress(psutil.Error):
            process.kill()


def strike(number: int) -> Callable[[Scene, random.Random], None]:
    """Signals the process that was started, one that trains, or all."""

    def send(scene: Scene, dice: random.Random) -> None:
        victim = dice.choice(["the process", "one that trains", "all"])
        if victim == "all" and number == signal.SIGKILL:
            scene.kill_all()
            return
        listeners = scene.listeners()
        if victim == "one that trains" and listeners:
            dice.choice(listeners).send_signal(number)
        else:
            scene.life.signal(number)

    return send


def leave_it(scene: Scene) -> None:
    """There is nothing to end."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that befalls a work.

    Attributes:
      begin: may raise IndexError or psutil.Error where there is nothing that it could befall.
      end: of it.
      kind: of the scene that it needs.
      statuses: that a work may end with, besides 0.
      outlasting: those besides, where it lasts longer than a work has patience.
      long_seconds: that it lasts then; 0 if there is no such time.
    """

    begin: Callable[[Scene, random.Random], None]
    end: Callable[[Scene], None]
    kind: str | None = None
    statuses: tuple[int, ...] = ()
    outlasting: tuple[int, ...] = ()
    long_seconds: float = 0.0


UNAVAILABLE = (EXIT_STORE_UNAVAILABLE,)
SLOW = (
    Answer("slow_upload", method="POST", path="uploadType", count=None, bytes_per_second=3e4),
    Answer("slow_answer", count=None, seconds=0.7),
)
FAULTS = {
    "kill": Fault(strike(signal.SIGKILL), leave_it, statuses=LOST_PEER),
    "term": Fault(strike(signal.SIGTERM), leave_it, statuses=(PREEMPTED,)),
    "disk": Fault(fill_disk, free_disk, DISK, (EXIT_USER_ERROR,), (), 300.0),
    "503": Fault(fail_store(Answer("status", count=None)), mend_store, BUCKET, (), UNAVAILABLE, 75.0),
    "slow": Fault(fail_store(*SLOW), mend_store, BUCKET),
    "silent": Fault(fail_store(Answer("stall_upload", count=None)), mend_store, BUCKET, (), UNAVAILABLE, 45.0),
    "clock": Fault(shift_clock, mend_clock),
    "fork": Fault(fork_child, leave_it, statuses=LOST_PEER),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """Something that a user runs.

    Attributes:
      module: that python -m is told.
      arguments: for a run directory.
      compare: what a finished run directory and an undisturbed one do not share; told whether lines of logs are lost.
      trained: whether a training has been done in the run directory before.
    """

    module: str
    arguments: Callable[[str], list[str]]
    compare: Callable[[pathlib.Path, pathlib.Path, bool], list[str]]
    trained: bool = False


def compare_runs(found: pathlib.Path, expected: pathlib.Path, lines_lost: bool) -> list[str]:
    unlike = differences(Run(found), Run(expected))
    if lines_lost and "metrics.jsonl" in unlike:
        unlike.remove("metrics.jsonl")
    rows, known = ([(p["step"], p["split"]) for p in Run(each).points()] for each in (found, expected))
    return unlike + (["rows of metrics.jsonl"] if len(rows) != len(set(rows)) or set(rows) - set(known) else [])


def compare_sweeps(found: pathlib.Path, expected: pathlib.Path, lines_lost: bool) -> list[str]:
    ours, theirs = Sweep(found), Sweep(expected)
    unlike = [] if ours.outcomes == theirs.outcomes else [f"outcomes {ours.outcomes}, not {theirs.outcomes}"]
    unlike += [] if ours.result["best"] == theirs.result["best"] else ["best"]
    ends = [(event["trial"], event["rung"]) for event in ours.ends]
    unlike += ["sweep.jsonl has an end twice"] if len(ends) != len(set(ends)) else []
    for trial in {end[0] for end in ends}:
        points, others = ([(p["step"], p["split"]) for p in s.metrics(trial)] for s in (ours, theirs))
        if points != others and not (lines_lost and len(points) == len(set(points)) and set(points) <= set(others)):
            unlike.append(f"metrics.jsonl of {trial}: {points}, not {others}")
    return unlike


def compare_files(*patterns: str) -> Callable[[pathlib.Path, pathlib.Path, bool], list[str]]:
    """Compares the bytes of all that has such names."""

    def compare(found: pathlib.Path, expected: pathlib.Path, lines_lost: bool) -> list[str]:
        read = [
            {p.relative_to(root): p.read_bytes() for pattern in patterns for p in root.glob(pattern) if p.is_file()}
            for root in (found, expected)
        ]
        return [str(name) for name in read[0].keys() | read[1].keys() if read[0].get(name) != read[1].get(name)]

    return compare


def compare_exports(found: pathlib.Path, expected: pathlib.Path, lines_lost: bool) -> list[str]:
    import tensorflow as tf

    values: list[list[bytes]] = []  # but seeds, which are others each time, as names are
    for root in (found, expected):
        reader = tf.train.load_checkpoint(str(root / "export/saved_model/variables/variables"))
        kinds = reader.get_variable_to_dtype_map()
        values.append(sorted(reader.get_tensor(n).tobytes() for n, kind in kinds.items() if kind.is_floating))
    unlike = [] if values[0] == values[1] else ["export/saved_model"]
    return unlike + compare_files(*KEPT)(found, expected, lines_lost)


def compare_evaluations(found: pathlib.Path, expected: pathlib.Path, lines_lost: bool) -> list[str]:
    ours, theirs = (json.loads((root / "evaluation.json").read_text()) for root in (found, expected))
    ours, theirs = ({k: v for k, v in each.items() if k != "evaluated"} for each in (ours, theirs))
    return [] if ours == theirs else [f"evaluation.json: {ours}, not {theirs}"]


WORKS = ("train", "two_workers", "tune", "evaluate", "predict", "export")


def build_works(root: pathlib.Path) -> dict[str, Work]:
    """By name; the sweep's files lie in `root`."""
    sweep = [
        "from crashes import experiment",
        "train.callbacks = [@experiment.Paced()]",
        "from tfdist.checkpoint import policy",
        "train.checkpoint = @policy.CheckpointPolicy(every_epochs=1)",
        "tune.max_trials = 2",
        "train.epochs = 3",
    ]
    gin_file = write_experiment(root)

    def train(strategy: str) -> Callable[[str], list[str]]:
        return lambda run_dir: runs.command(strategy, run_dir)[1:]  # type: ignore[arg-type]

    def use(mode: str) -> Callable[[str], list[str]]:
        return lambda run_dir: [f"--mode={mode}", f"--run_dir={run_dir}"]

    return {
        "train": Work("tfdist.main", train("one_device"), compare_runs),
        "two_workers": Work("tfdist.launch", train("multi_worker"), compare_runs),
        "tune": Work("tfdist.main", lambda run_dir: arguments(gin_file, run_dir, *sweep), compare_sweeps),
        "evaluate": Work("tfdist.main", use("evaluate"), compare_evaluations, trained=True),
        "predict": Work("tfdist.main", use("predict"), compare_files("predictions/part-*", *KEPT), trained=True),
        "export": Work("tfdist.main", use("export"), compare_exports, trained=True),
    }


class Torture:
    """Works under faults.

    Args:
      root: for all files.
      dice: decide.
      tell: takes a line.

    Attributes:
      counts: how often each fault befell each work.
      statuses: how often a start of each work ended with each.
      problems: in words.
    """

    def __init__(self, root: pathlib.Path, dice: random.Random, tell: Callable[[str], None]) -> None:
        self.root, self.dice, self.tell = root, dice, tell
        self.counts: Counter[tuple[str, str]] = Counter()
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.problems: list[str] = []
        self.works = build_works(root)
        self._undisturbed: dict[str, tuple[pathlib.Path, float]] = {}
        self._runs = 0

    def undisturbed(self, name: str) -> tuple[pathlib.Path, float]:
        """The run directory of a work that nothing befell, and how many seconds that took."""
        if name not in self._undisturbed:
            with scene(self.root / f"undisturbed-{name}", None) as place:
                if self.works[name].trained:
                    place.put(self.undisturbed("train")[0])
                began = time.monotonic()
                if status := self._live(name, place, {}):
                    raise SystemExit(f"{name} without any fault ended with {status}: {place.root}")
                self._undisturbed[name] = pathlib.Path(place.run_dir), time.monotonic() - began
        return self._undisturbed[name]

    def disturb_at_random(self, name: str, faults: Sequence[str], *, lives: int = 3) -> None:
        """One work, with some of the faults, the rarest so far first."""
        kinds = [kind for kind in (DISK, BUCKET) if any(FAULTS[fault].kind == kind for fault in faults)]
        kind = self.dice.choice(kinds or [None])
        eligible = [fault for fault in faults if FAULTS[fault].kind in (None, kind)]

        def plans() -> Iterator[Plan]:
            for _ in range(lives):
                rare = sorted(eligible, key=lambda fault: (self.counts[fault, name], self.dice.random()))
                yield {fault: self._lasts(fault, name) for fault in rare[: 1 + (self.dice.random() < 0.5)]}

        self.disturb(name, kind, plans())

    def disturb(self, name: str, kind: str | None, plans: Iterable[Plan]) -> None:
        """One work from its beginning to its end: starts with faults, until one comes to the end, and one in peace.

        Args:
          name: of the work.
          kind: of the scene.
          plans: of the starts.
        """
        expected, seconds = self.undisturbed(name)
        self._runs += 1
        before = len(self.problems)
        with scene(self.root / f"run-{self._runs}-{name}", kind) as place:
            if self.works[name].trained:
                place.put(self.undisturbed("train")[0])
            lines_lost = False
            for plan in plans:
                began = time.monotonic()
                status = self._live(name, place, plan)
                lines_lost |= LOST_LINES in place.life.output or (kind == BUCKET and status not in (0, PREEMPTED))
                if status == 0 and not self.works[name].trained:
                    self._undisturbed[name] = expected, min(seconds, time.monotonic() - began)
                    break
            if status := self._live(name, place, {}):
                self._report(name, place, f"in peace it ended with {status}")
            elif unlike := self._compare(name, place.fetch(), expected, lines_lost):
                self._report(name, place, f"is not the undisturbed one: {'; '.join(unlike)}")
            if len(self.problems) > before and kind == DISK:
                shutil.copytree(place.root / DISK, place.root / "kept")
        if len(self.problems) == before:
            shutil.rmtree(place.root)

    def _compare(self, name: str, found: pathlib.Path, expected: pathlib.Path, lines_lost: bool) -> list[str]:
        try:
            return self.works[name].compare(found, expected, lines_lost)
        except (OSError, ValueError, LookupError) as error:  # a file is missing or is damaged
            return [f"{type(error).__name__}: {error}"]

    def _lasts(self, fault: str, name: str) -> tuple[float, float]:
        """When a fault begins, in seconds from the start, and how long it lasts."""
        begins = self.dice.choice([0.0, *[self.dice.uniform(0.0, self.undisturbed(name)[1])] * 4])
        is_long = FAULTS[fault].long_seconds and self.dice.random() < 0.25
        lasts = FAULTS[fault].long_seconds if is_long else self.dice.choice([self.dice.uniform(0.5, 8.0), 8.0])
        return begins, lasts

    def _live(self, name: str, place: Scene, plan: Plan) -> int:
        """One start; its exit status."""
        work = self.works[name]
        site, log = place.root / "site", place.root / f"life-{len(list(place.root.glob('life-*')))}"
        for mark in site.glob(f"{hooks.LISTENS}*"):
            mark.unlink()
        variables = support.TESTS_PATH | {PACE: "0.1", hooks.SITE: str(site)}
        if place.server is not None:
            variables["STORAGE_EMULATOR_HOST"] = place.server.address
        steps = sorted((at, end, fault) for fault, (b, s) in plan.items() for at, end in ((b, False), (b + s, True)))
        active: list[str] = []
        allowed = {0}
        old = list(place.orphans)
        if steps and steps[0][0] == 0 and not steps[0][1] and FAULTS[steps[0][2]].kind:
            self._begin(steps.pop(0)[2], place, name, plan, active, allowed)
        command = work.arguments(place.run_dir)
        if plan and not work.trained and self.dice.random() < STOPPED:
            command.append("--gin_param=policy.CheckpointPolicy.on_error = 'stop'")
        place.life = running(command, log, variables, support.REPOSITORY, work.module)
        began, status = time.monotonic(), None
        while status is None and time.monotonic() < began + MOST_SECONDS:
            left = steps[0][0] - (time.monotonic() - began) if steps else 1.0
            if left <= 0:
                _, ends, fault = steps.pop(0)
                if not ends:
                    if not self._begin(fault, place, name, plan, active, allowed):
                        steps = sorted([*steps, (time.monotonic() - began + 0.1, ends, fault)])
                elif fault in active:
                    FAULTS[fault].end(place)
                    active.remove(fault)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = place.life.end(timeout=min(max(left, 0.0), 1.0))
        for fault in active:
            FAULTS[fault].end(place)
        if status is None:
            self._report(name, place, f"{plan}: it did not end")
        else:
            status = as_in_shell(status)
            give_up = time.monotonic() + LEFT_SECONDS
            while (left_behind := place.processes()) and time.monotonic() < give_up:
                time.sleep(0.05)
            if left_behind:
                self._report(name, place, f"{plan}: left behind {[p.cmdline() for p in left_behind]}")
        place.kill_all()
        end_children(old)
        place.orphans = [process for process in place.orphans if process not in old]
        self.statuses[name, status] += 1
        self.tell(f"{name}: {log}: {plan} → {status}")
        if plan and status is not None and status not in allowed:
            self._report(name, place, f"{plan}: ended with status {status}, not one of {sorted(allowed)}")
        for word in CRASHED:
            if word in place.life.output:
                self._report(name, place, f"{plan}: printed {word!r} in {log}")
        return status

    def _begin(self, fault: str, place: Scene, work: str, plan: Plan, active: list[str], allowed: set[int]) -> bool:
        try:
            FAULTS[fault].begin(place, self.dice)
        except (IndexError, psutil.Error):
            return False  # nothing that it could befall is there yet
        self.counts[fault, work] += 1
        active.append(fault)
        allowed.update(FAULTS[fault].statuses)
        if plan[fault][1] > PATIENCE_SECONDS:
            allowed.update(FAULTS[fault].outlasting)
        if fault == "term" and len(plan) > 1:
            allowed.add(EXIT_NOT_SAVED)
        return True

    def _report(self, work: str, place: Scene, what: str) -> None:
        self.problems.append(f"{work}: {place.root}: {what}")
        self.tell(f"PROBLEM {self.problems[-1]}")
