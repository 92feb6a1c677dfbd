"""The slots of a sweep on a Ray cluster: what Ray has set aside for one trial at a time, and the tasks that use it.

A task runs the command of one trial. Ray finds another node for a slot whose node is lost, and the trial is reported as
interrupted. Nothing is kept in Ray: when the scheduler ends, so do the tasks, and the sweep's journal says what was.

Invariant: a trial has one process at a time that counts. Should one live on where the network was cut, the lease of its
run directory keeps the next one out until it has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.errors import EXIT_PREEMPTED, UserError
from tfdist.launch.processes import bound_to_parent, send_to_group, shell_status
from tfdist.launch.ray import cluster
from tfdist.launch.ray.cluster import Resources
from tfdist.storage import files
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.execution import trials
from tfdist.tuning.execution.trials import TrialCommand, TrialExit

FIRST_MESSAGE_SECONDS, NEXT_MESSAGE_SECONDS = 10.0, 60.0  # that Ray has no room yet
_POLL_SECONDS, _PLACEMENT_SECONDS = 0.1, 0.5


@dataclasses.dataclass
class _Slot:
    """What Ray sets aside; while it runs a trial, with the `task`."""

    group: Any
    host: str | None = None
    trial: str | None = None
    task: Any = None
    started: float = 0.0


class RaySlots(trials.Slots):
    """Slots for trials of one process on a Ray cluster.

    Args:
      command: of each.
      count: of slots.
      resources: of each.
      run_dir: of the sweep; it exists, and all nodes have it.
      working_dir: that Ray copies to every node; None: they share it.
      notify: takes what the user should know.

    Raises:
      UserError: no cluster can be reached.
    """

    def __init__(
        self,
        command: TrialCommand,
        count: int,
        resources: Resources,
        *,
        run_dir: str,
        working_dir: str | None,
        notify: Callable[[str], None],
    ) -> None:
        self._command, self._resources, self._notify = command, resources, notify
        self._sweep = RunDirectory(_make_absolute(run_dir))
        self._started_in = os.getcwd() if working_dir is None else None
        self._mark = uuid.uuid4().hex
        files.write_atomic(self._sweep.sweep_mark, self._mark)
        self._closing = contextlib.ExitStack()
        self._ray = self._closing.enter_context(cluster.connect("A sweep on Ray", working_dir=working_dir))
        self._slots = [_Slot(self._ray.util.placement_group([resources.bundle])) for _ in range(count)]
        self._next_poll, self._next_message = 0.0, time.monotonic() + FIRST_MESSAGE_SECONDS

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def next_host(self) -> str | None:
        return self._free[0].host

    def start(self, directory: RunDirectory, parameters: Sequence[str]) -> None:
        slot, directory = self._free[0], RunDirectory(_make_absolute(directory.path))
        slot.trial, slot.started = os.path.basename(directory.path), time.monotonic()
        where = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(slot.group)
        task = self._ray.remote(train).options(
            **self._resources.options,
            name=f"trial {slot.trial}",  # as Ray's dashboard shows it
            max_retries=0,
            scheduling_strategy=where,
        )
        command = self._command.build(directory, parameters)
        slot.task = task.remote(command, directory.path, self._started_in, self._sweep.path, self._mark)

    def stop(self, name: str) -> None:
        for slot in self._slots:
            if slot.trial == name:
                self._ray.cancel(slot.task)

    def wait(self, seconds: float) -> None:
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        if tasks:
            self._ray.wait(tasks, timeout=seconds)
        else:
            time.sleep(seconds)
        self._poll_placements()

    def collect(self) -> Iterator[TrialExit]:
        for slot in self._slots:
            if slot.task is None or not self._ray.wait([slot.task], timeout=0)[0]:
                continue
            name, task, seconds = slot.trial, slot.task, time.monotonic() - slot.started
            slot.trial = slot.task = None
            assert name is not None
            try:
                status, log = self._ray.get(task)
            except self._ray.exceptions.TaskCancelledError:  # before it began
                yield TrialExit(name, EXIT_PREEMPTED, "", seconds)
            except self._ray.exceptions.RayError as error:
                if isinstance(cause := getattr(error, "cause", None), UserError):
                    raise cause from None
                yield self._report_loss(slot, name, seconds, error)
            else:
                yield TrialExit(name, status, log, seconds)

    def close(self) -> None:
        for slot in self._slots:
            if slot.task is not None:
                self._ray.cancel(slot.task, force=True)
            self._ray.util.remove_placement_group(slot.group)
        self._closing.close()

    @property
    def _free(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.host is not None and slot.task is None]

    def _report_loss(self, slot: _Slot, name: str, seconds: float, error: Exception) -> TrialExit:
        why, host = cluster.reason(error), slot.host
        slot.host = None  # until Ray has looked for room again
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            return TrialExit(name, trials.EXIT_KILLED, f"{why}\n{trials.OUT_OF_MEMORY}", seconds)
        self._notify(f"the place of trial {name} on {host} was lost: {why}; the trial is queued again")
        return TrialExit(name, EXIT_PREEMPTED, "", seconds, lost=f"its place on {host} was lost: {why}")

    def _poll_placements(self) -> None:
        """Finds out where the slots are, and says when nobody trains for want of room."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + _PLACEMENT_SECONDS
        if waiting := [slot for slot in self._slots if slot.host is None]:
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
            for slot in waiting:
                found = self._ray.util.placement_group_table(slot.group)
                if found["state"] == "CREATED":
                    slot.host = nodes.get(found["bundles_to_node_id"][0])
        if any(slot.host for slot in self._slots):
            self._next_message = now + FIRST_MESSAGE_SECONDS
        elif now > self._next_message:
            self._next_message = now + NEXT_MESSAGE_SECONDS
            self._notify(
                f"waiting for Ray to find {self._resources} for a trial; {cluster.describe_resources(self._ray)}"
            )


def train(command: Sequence[str], run_dir: str, started_in: str | None, sweep_dir: str, mark: str) -> tuple[int, str]:
    """Runs the command of a trial on a node; its exit status, and the end of what it wrote.

    It starts in the directory where the sweep was started, if the node has that. Ray ends it by a KeyboardInterrupt, at
    which the trial saves and leaves.

    Raises:
      UserError: the node does not have the sweep's run directory.
    """
    check_shared(sweep_dir, mark)
    kills_before = trials.count_memory_kills()
    with contextlib.ExitStack() as at_end:
        directory = run_dir
        if files.is_remote(run_dir):
            directory = at_end.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-trial-"))
        files.make_dirs(directory)
        path = os.path.join(directory, trials.LOG)
        with open(path, "ab") as output:
            process = subprocess.Popen(
                bound_to_parent([sys.executable, "-m", *command]),
                cwd=started_in if started_in and os.path.isdir(started_in) else None,
                env=trials.trial_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        at_end.callback(send_to_group, process.pid, signal.SIGKILL)
        while process.returncode is None:
            try:
                while process.poll() is None:
                    time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                process.terminate()
        status, log = shell_status(process.returncode), trials.read_log(path)
    return status, trials.explain_kill(status, log, kills_before)


def check_shared(sweep_dir: str, mark: str) -> None:
    """Raises UserError where this node has another run directory than the sweep."""
    try:
        found = files.read(RunDirectory(sweep_dir).sweep_mark).decode()
    except OSError:
        found = ""
    if found != mark:
        raise UserError(
            f"The node {socket.gethostname()} does not have the sweep's run directory {sweep_dir}: all nodes share "
            "one. Give --run_dir=gs://BUCKET/DIRECTORY, or a directory of a file system that all of them have."
        )


def _make_absolute(path: str) -> str:
    return path if files.is_remote(path) else os.path.abspath(path)
