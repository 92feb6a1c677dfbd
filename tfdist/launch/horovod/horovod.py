"""The launcher horovod: the workers are started by `horovodrun --gloo` on this machine.

horovodrun reports 1 whatever a worker's status was, and ends the others in its own way. So each worker runs under
`horovod_worker.py`, which leaves process number and status in a temporary directory; from there the workers are
watched and signalled as those of `local.py` are, and horovodrun, made deaf to SIGTERM by `horovodrun.py`, only starts
them and passes on what they write. Its own words (it imports TensorFlow, which talks) are shown only if a worker did
not come to run.

Invariant: none of horovodrun's processes is left when `start` ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfdist.errors import EXIT_BUG, UserError
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Process, Worker, send_to_group
from tfdist.launch.supervise.output import STDERR, STDOUT, Output

_DRAIN_SECONDS = 10.0
_END_SECONDS = 10.0  # for horovodrun to notice that its ranks have ended
_TIMEOUT_VARIABLE, _SILENCE_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS", 3600
_RANK_PREFIX = re.compile(rb"\[(?:\d+,)?(\d+)\]<(?:stdout|stderr)>:")  # "[1]<stdout>:" of Gloo, "[1,1]<…>:" of MPI


class HorovodWorker(Worker):
    """A rank, as `horovod_worker.py` reports it. Ends with horovodrun's status if that ends before it reported."""

    def __init__(self, index: int, directory: Path, horovodrun: Process) -> None:
        self.index = index
        self.heartbeat = directory / f"{index}.heartbeat"
        self._status_file = directory / f"{index}.status"
        self._pid_file = directory / f"{index}.pid"
        self._horovodrun = horovodrun
        self._owed: int | None = None  # a signal from before it was started

    @property
    def pid(self) -> int | None:
        return int(self._pid_file.read_text()) if self._pid_file.exists() else None

    @property
    def has_reported(self) -> bool:
        return self._status_file.exists()

    def poll(self) -> int | None:
        horovodrun_status = self._horovodrun.poll()  # before the file is read, which comes first
        if self.has_reported:
            return int(self._status_file.read_text())
        if self._owed is not None and self._pid_file.exists():
            self._signal(self._owed)
            self._owed = None
        if horovodrun_status is None:
            return None
        return horovodrun_status or EXIT_BUG if self._owed is None else 128 + self._owed

    def send(self, signal_number: int) -> None:
        if self.poll() is not None:
            return
        if self._pid_file.exists():
            self._signal(signal_number)
        elif signal_number == signal.SIGKILL:
            self._horovodrun.send(signal_number)
        else:
            self._owed = signal_number

    def _signal(self, signal_number: int) -> None:
        pid = int(self._pid_file.read_text())
        if signal_number == signal.SIGKILL:
            send_to_group(pid, signal_number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)


@contextlib.contextmanager
def start(plan: Plan, output: Output) -> Iterator[Sequence[Worker]]:
    """Starts the workers; none is left when the context ends, whatever ends it.

    Raises:
      UserError: Horovod is not installed.
    """
    with contextlib.ExitStack() as at_end:
        directory = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-launch-")))
        at_end.callback(output.drain, _DRAIN_SECONDS)
        horovodrun = Process(-1, command_line(plan, directory), plan.environment)
        workers = [HorovodWorker(index, directory, horovodrun) for index in range(len(plan.places))]
        at_end.callback(_end, horovodrun, workers)
        own_words: list[bytes] = []

        def label(line: bytes) -> list[tuple[int, bytes]]:
            if not (labeled := take_apart(line)):
                own_words.append(line)
            return labeled

        for pipe, stream in zip(horovodrun.pipes, (STDOUT, STDERR), strict=True):
            output.follow(pipe, stream, label)
        yield workers
        if not all(worker.has_reported for worker in workers):
            _end(horovodrun, workers)
            output.drain(_DRAIN_SECONDS)
            output.say(
                "horovodrun did not bring up every worker. It said:\n" + b"\n".join(own_words).decode(errors="replace")
            )


def command_line(plan: Plan, directory: Path) -> list[str]:
    """Of horovodrun, for the workers of this machine."""
    cpus = ":".join(",".join(map(str, share)) for share in plan.cpus)
    number = len(plan.places)
    # Of a silent worker. One that dies is noticed at once, and on one machine only a stopped one is silent.
    patience = [] if _TIMEOUT_VARIABLE in plan.environment else ["--gloo-timeout-seconds", str(_SILENCE_SECONDS)]
    own = json.dumps([plan.own_variables(index) for index in range(number)])
    hosts = ["-np", str(number), "-H", f"localhost:{number}", *patience]
    worker = [sys.executable, "-m", "tfdist.launch.horovod.horovod_worker", str(directory), cpus, own, *plan.command]
    deaf = [sys.executable, "-m", "tfdist.launch.horovod.horovodrun", find_horovodrun(plan.environment.get("PATH"))]
    return [*deaf, "--gloo", "--disable-cache", *hosts, *worker]


def find_horovodrun(path: str | None) -> str:
    """The horovodrun beside this Python, or else on the PATH."""
    beside = Path(sys.executable).with_name("horovodrun")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("horovodrun", path=path)
    if not found:
        raise UserError(
            f"--launcher=horovod needs horovodrun, which is neither beside {sys.executable} nor on the PATH. "
            "Run: python tools/build_horovod.py"
        )
    return found


def take_apart(line: bytes) -> list[tuple[int, bytes]]:
    """The ranks that wrote a line of horovodrun's output, and what they wrote; empty for horovodrun's own lines.

    There are several when a rank's last words had no newline.
    """
    first, *rest = _RANK_PREFIX.split(line)
    return [(int(rank), text) for rank, text in zip(rest[::2], rest[1::2], strict=True)] if not first else []


def _end(horovodrun: Process, workers: Sequence[HorovodWorker]) -> None:
    """Ends what is left of the workers; horovodrun then ends by itself, or is killed."""
    for worker in workers:
        worker.send(signal.SIGKILL)
    give_up = time.monotonic() + _END_SECONDS
    while horovodrun.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)
    horovodrun.send(signal.SIGKILL)
    horovodrun.wait()
