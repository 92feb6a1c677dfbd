"""Takes profiles of a running training with TensorFlow's profiler: of the steps that were asked for, or at a signal.

Invariant: a profile changes nothing of what is trained; where it cannot be taken or written, a warning says so, and the
training goes on. Steps that the command names are known to all workers, so calls are cut at them alike. A signal may
come to one worker alone: its profile takes whole calls as they are. The loop tells it of each call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import tensorflow as tf

from tfdist.storage import files
from tfdist.telemetry.heartbeat import PROFILE_SIGNAL
from tfdist.training.run.run import Run

MARK = "train"  # what the profiler's time line calls a call of the step function
SIGNALED_STEPS = 10  # a profile at a signal ends with the call that has done so many
# TensorFlow 2.21's profiler ends the process of a MultiWorker run in native code, now and then, where it is stopped
# while other threads compute: in 2 of some 25 profiles, and in 1 of some 600 that waited 0.2 s.
REST_SECONDS, REST_SHARE, LONGEST_WAIT = 0.2, 0.1, 5.0  # their share of a processor, for so long


@dataclasses.dataclass
class _Session:
    """A profile that is being taken, of the steps after `begin`, until `end` at least."""

    begin: int
    end: int
    scratch: tempfile.TemporaryDirectory[str]


class Profiler:
    """Context manager around a loop, in whose time PROFILE_SIGNAL asks for a profile of the next steps.

    Each worker writes a file of its own, for TensorBoard's profile plugin and xprof. A handler that the process already
    has for the signal stays.

    Args:
      run: open; its request may name steps.
      total_steps: of the run.

    Raises:
      UserError: the run does not have these steps.
    """

    def __init__(self, run: Run, total_steps: int) -> None:
        if run.request.profile is not None:
            run.request.profile.check(total_steps)
        self._directory, self._topology, self._events = run.directory, run.topology, run.events
        self._asked, self._hears = run.request.profile, run.request.keeps
        self._has_begun_asked = False
        self._is_signaled = False
        self._session: _Session | None = None
        self._step = 0
        self._old_handler: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> Profiler:
        self._old_handler = signal.getsignal(PROFILE_SIGNAL)
        if self._handles_signal:
            signal.signal(PROFILE_SIGNAL, self._record_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handles_signal:
            signal.signal(PROFILE_SIGNAL, self._old_handler)
        if self._session is not None:
            self._end(self._session)
        if error is None and self._asked is not None and not self._has_begun_asked:
            first, last = self._asked.first, self._asked.last
            path = self._directory.profile(f"steps-{first}-{last}", self._topology.worker_index)
            with contextlib.suppress(OSError):  # a store that does not answer
                if not files.exists(path):
                    self._warn("this start of the run has done none of them", f"the steps {first} to {last}")

    @property
    def _handles_signal(self) -> bool:
        """Python sets handlers in the main thread alone."""
        is_free = self._old_handler in (signal.SIG_DFL, signal.SIG_IGN)
        return self._hears and is_free and threading.current_thread() is threading.main_thread()

    def _record_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_signaled = True

    def next_edge(self, step: int) -> int | None:
        """Where the call after `step` has to end at the latest; None: anywhere. The same on all workers."""
        return None if self._asked is None else self._asked.next_edge(step)

    def before_call(self, step: int) -> None:
        """Begins or ends a profile, where `step` steps are done."""
        asked, self._step = self._asked, step
        begins_asked = asked is not None and not self._has_begun_asked and asked.first - 1 <= step < asked.last
        if self._session is not None and (begins_asked or step >= self._session.end):
            self._end(self._session)  # its last steps may have been left out, so that no call came to its end
        if asked is not None and begins_asked:
            self._has_begun_asked = True
            self._begin(step, asked.last)
        elif self._is_signaled and self._session is None:
            self._is_signaled = False
            self._begin(step, step + SIGNALED_STEPS)

    def trace_call(self, last_step: int, steps: int) -> contextlib.AbstractContextManager[object]:
        """A context in which a call's time goes into the profile, if one is being taken."""
        if self._session is None:
            return contextlib.nullcontext()
        return tf.profiler.experimental.Trace(MARK, step_num=last_step, steps=steps, _r=1)

    def after_call(self, step: int) -> None:
        """Ends the profile if it has its steps, where `step` steps are done."""
        self._step = step
        if self._session is not None and step >= self._session.end:
            self._end(self._session)

    def _begin(self, begin: int, end: int) -> None:
        with contextlib.ExitStack() as undo:
            try:
                scratch = tempfile.TemporaryDirectory(prefix="tfdist-profile-")
                undo.callback(scratch.cleanup)
                tf.profiler.experimental.start(scratch.name)
                undo.pop_all()
                self._session = _Session(begin, end, scratch)
            except Exception as error:  # of any class: another profiler in this process, a full disk
                self._warn(f"{type(error).__name__}: {error}", f"the steps after {begin:,}")

    def _end(self, session: _Session) -> None:
        self._session = None
        try:
            with session.scratch as scratch:
                _await_rest()
                tf.profiler.experimental.stop(save=self._step > session.begin)
                if self._step > session.begin:
                    (path,) = Path(scratch).rglob("*.xplane.pb")
                    self._write(path.read_bytes(), session.begin + 1)
        except Exception as error:  # of any class, as above; the training goes on
            self._warn(f"{type(error).__name__}: {error}", f"the steps {session.begin + 1:,} to {self._step:,}")

    def _write(self, profile: bytes, first: int) -> None:
        path = self._directory.profile(f"steps-{first}-{self._step}", self._topology.worker_index)
        files.make_dirs(os.path.dirname(path))
        files.write_atomic(path, profile)
        self._events.info(
            "profiled",
            step=self._step,
            message=(
                f"Profile of the steps {first:,} to {self._step:,}: {path}; "
                f"show it with: tensorboard --logdir={self._directory.tensorboard}"
            ),
            first_step=first,
            path=path,
        )

    def _warn(self, why: str, what: str) -> None:
        self._events.warning(
            "not_profiled", step=self._step, message=f"There is no profile of {what}: {why.rstrip('.')}."
        )


def _await_rest() -> None:
    """Waits until the process has computed next to nothing for REST_SECONDS, or LONGEST_WAIT is over."""
    deadline, used = time.monotonic() + LONGEST_WAIT, -float("inf")
    while time.process_time() - used > REST_SHARE * REST_SECONDS and time.monotonic() < deadline:
        used = time.process_time()
        time.sleep(REST_SECONDS)
