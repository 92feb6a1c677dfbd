"""What a worker lets its supervisor see: its process and host, what it does, its last step, and on request its stacks.

Invariant: `beat` costs some microseconds, waits for nobody and touches no TensorFlow; without a supervisor it does
nothing. A supervisor names a file to each worker in the variable VARIABLE of its environment; the worker keeps one
record there, which `read` gives back. Moments are of the clock that all processes of one machine share.

`main.py` begins it, the training tells it where it is, `tfdist.launch` reads it. The account of the process's time is
kept up to date on the way. Imports the standard library and that account alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tfdist.telemetry.account import time_account

VARIABLE = "TFDIST_HEARTBEAT"
STACKS_SIGNAL = signal.SIGQUIT  # as other run times dump their stacks
PROFILE_SIGNAL = signal.SIGUSR2  # SIGUSR1 is Slurm's warning
REMEMBERED = 32  # of the last durations of a phase
_RECORD_BYTES = 640  # of JSON, with spaces behind it; a host's name has up to 255

# Of time_account.PHASES.
STARTING = "import"
CONNECTING = "connect"
PREPARING = "data"
BUILDING = "build"
RESTORING = "restore"
TRAINING = "compute"
BETWEEN = "callbacks"
EVALUATING = "evaluate"
SAVING = "checkpoint"
AGREEING = "peer_wait"
FINISHING = "finish"
LEAVING = "leave"


@dataclasses.dataclass(frozen=True)
class Reading:
    """The newest state that a worker wrote.

    Attributes:
      pid: of the process that wrote it.
      host: its name.
      phase: what it is doing, of `time_account.PHASES`.
      turn: how many turns of phases it has begun.
      step: the last one it has done; None before it knows.
      moment: when it began the phase, by `time.monotonic` of this machine.
      recent_seconds: the slowest of the phase's last turns in this process; 0 where this is the first.
      longest_seconds: the slowest of all of them, the first, which compiles, included.
      shows_stacks: whether STACKS_SIGNAL has it write its stacks.
      is_storing: whether it writes a checkpoint in the background.
    """

    pid: int
    host: str
    phase: str
    turn: int
    step: int | None
    moment: float
    recent_seconds: float = 0.0
    longest_seconds: float = 0.0
    shows_stacks: bool = False
    is_storing: bool = False

    @property
    def activity(self) -> str:
        """The phase in words, such as "building the model"."""
        phase = time_account.PHASES.get(self.phase)
        return self.phase if phase is None else phase.activity

    def encode(self) -> bytes:
        """Returns the content of the file."""
        return json.dumps(vars(self)).encode().ljust(_RECORD_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> Reading | None:
        """`encode`, the other way; None where nothing, or something else, is written."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            return None


class Heartbeat:
    """The record of this process. Raises OSError where its file cannot be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._reading = Reading(os.getpid(), socket.gethostname(), STARTING, 1, None, time.monotonic())
        self._recent: dict[str, collections.deque[float]] = {}
        self._longest: dict[str, float] = {}
        self._exit_info: dict[str, Any] = {}
        self._storing: set[int] = set()
        self._lock = threading.Lock()
        self._write(shows_stacks=self._offer_stacks())

    def beat(self, phase: str, step: int | None = None) -> None:
        """A turn of the last phase is over, one of `phase` begins."""
        with self._lock:
            now, ended = time.monotonic(), self._reading
            seconds = now - ended.moment
            self._recent.setdefault(ended.phase, collections.deque(maxlen=REMEMBERED)).append(seconds)
            self._longest[ended.phase] = max(seconds, self._longest.get(ended.phase, 0.0))
            self._write(
                phase=phase,
                moment=now,
                turn=ended.turn + 1,
                step=ended.step if step is None else step,
                recent_seconds=max(self._recent.get(phase, (0.0,))),
                longest_seconds=self._longest.get(phase, 0.0),
            )

    def set_writing_checkpoint(self, is_storing: bool, *, writer: int) -> None:
        """A writer has checkpoints to write in the background, or no more; any thread may say so."""
        with self._lock:
            (self._storing.add if is_storing else self._storing.discard)(writer)
            if bool(self._storing) != self._reading.is_storing:
                self._write(is_storing=bool(self._storing))

    def add_exit_info(self, **info: Any) -> None:
        """Adds facts to the file that the supervisor reads when this process has ended, and writes it at once."""
        self._exit_info |= info
        part = f"{self._path}.facts.part"
        Path(part).write_text(json.dumps(self._exit_info))
        os.replace(part, f"{self._path}.facts")

    def _offer_stacks(self) -> bool:
        """Whether `faulthandler` writes all threads' stacks when asked: also while Python itself is stuck."""
        self._stacks = open(f"{self._path}.stacks", "a")  # noqa: SIM115 (as long as the process)
        try:
            faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        except (AttributeError, RuntimeError, ValueError):
            return False
        return True

    def _write(self, **changes: Any) -> None:
        self._reading = dataclasses.replace(self._reading, **changes)
        with contextlib.suppress(OSError):  # a full disk must not end a training
            os.pwrite(self._descriptor, self._reading.encode(), 0)


_HEARTBEAT: Heartbeat | None = None


def begin(path: str | None) -> None:
    """Shows this process from now on in `path`; None, or one that cannot be written: nobody looks."""
    global _HEARTBEAT
    if path:
        with contextlib.suppress(OSError):
            _HEARTBEAT = Heartbeat(path)


def beat(phase: str, step: int | None = None) -> None:
    """Records that this process begins a turn of `phase`, with `step` steps done; None: as many as before."""
    time_account.current().enter(phase, step)
    if _HEARTBEAT is not None:
        _HEARTBEAT.beat(phase, step)


def set_writing_checkpoint(is_storing: bool, *, writer: int) -> None:
    """Records whether a writer of this process, known by a number, has checkpoints left to write."""
    if _HEARTBEAT is not None:
        _HEARTBEAT.set_writing_checkpoint(is_storing, writer=writer)


def add_exit_info(**info: Any) -> None:
    """Adds facts, which JSON can hold, to the file that the supervisor reads when this process has ended."""
    if _HEARTBEAT is not None:
        with contextlib.suppress(OSError):
            _HEARTBEAT.add_exit_info(**info)


def _forget_after_fork() -> None:
    global _HEARTBEAT
    _HEARTBEAT = None


os.register_at_fork(after_in_child=_forget_after_fork)


def read(path: Path) -> Reading | None:
    """Reads the newest state of a worker; None before it wrote any."""
    try:
        return Reading.decode(path.read_bytes())
    except OSError:
        return None


def shift_times(record: bytes, seconds: float) -> bytes:
    """The content of a heartbeat's file with its moment so much later: by the clock of another machine."""
    reading = Reading.decode(record)
    return record if reading is None else dataclasses.replace(reading, moment=reading.moment + seconds).encode()


def read_exit_info(path: Path) -> dict[str, Any]:
    """Reads what the worker left for its supervisor; nothing where that cannot be read."""
    try:
        info = json.loads(path.with_name(path.name + ".facts").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


def stacks_path(path: Path) -> Path:
    """Returns the path to which the worker writes its stacks."""
    return path.with_name(path.name + ".stacks")
