"""Notes that this process will be ended soon, so that the loop can save and leave: signals, and notices from Google.

Invariant: a signal is only noted, however many come; nothing is interrupted and nothing raised, but at a second SIGINT.
The loop asks for `reason` between its calls and agrees with the other workers on the step to leave at. Of what Google's
metadata server says only that counts which ends the VM (a preemption, maintenance that terminates), not a live
migration; see https://cloud.google.com/compute/docs/metadata/querying-metadata.
"""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import queue
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

# Slurm's `--signal=USR1@120` sends the second one before its time limit.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Of which nohup, and a shell that starts a job in the background, has a process know nothing.
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGINT)


class Preemption:
    """Context manager under which SIGTERM, SIGUSR1, SIGHUP and a notice of the metadata server set `reason`.

    Python runs a signal's handler in the main thread between two of its instructions: a signal that comes during a
    call into TensorFlow is seen when that call returns.

    Args:
      tell: called with a sentence when something was noted, from a thread of this object's own and never from inside
        of a signal handler, where what it needs could be locked.
      metadata_address: `host` or `host:port` of the metadata server, see `find_address`; None: there is none.
      signals: that count. With SIGINT among them the first is noted, and the second ends what runs.
      abort: ends the process at a second SIGINT, whatever the main thread is doing; called from another thread. None
        raises KeyboardInterrupt in the main thread instead, once that runs Python.

    Attributes:
      reason: why this process has to leave, as a clause ("SIGTERM was received"), the first one; None: it has not.

    Example:

        with Preemption(tell=print, metadata_address=find_address()) as preemption:
            while preemption.reason is None:
                train_a_little()
    """

    def __init__(
        self,
        *,
        tell: Callable[[str], None],
        metadata_address: str | None = None,
        signals: Sequence[signal.Signals] = SIGNALS,
        abort: Callable[[], NoReturn] | None = None,
    ) -> None:
        self._tell = tell
        self._signals = tuple(signals)
        self._abort = abort
        self.reason: str | None = None
        self._first: int | None = None
        self._num_interrupts = 0
        self._wake: tuple[socket.socket, int] | None = None
        self._notes: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # whose `put` a signal handler may call
        self._thread: threading.Thread | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._metadata_address = metadata_address
        self._closing = threading.Event()

    @property
    def is_interrupt(self) -> bool:
        """Whether the reason is a SIGINT, which is a person's Ctrl-C."""
        return self._first == signal.SIGINT

    def note(self, reason: str, *, hint: str = "") -> None:
        """Has the process leave for `reason`, unless it already has another; callable anywhere, at any time."""
        text = reason[0].upper() + reason[1:]
        if self.reason is None:
            self.reason = reason
            self._notes.put(f"{text}: saving at the end of this step, then leaving.{hint}")
        else:
            self._notes.put(f"{text}: this run is already about to save and leave, and continues doing so.")

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():  # only there may Python set handlers
            for number in self._signals:
                if number in _MAY_BE_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._old_handlers[number] = signal.signal(number, self._on_signal)
            if getattr(self._old_handlers.get(signal.SIGINT), "was_called", False):  # and a library ate the exception
                self._on_signal(signal.SIGINT, None)
            if self._abort is not None and signal.SIGINT in self._old_handlers:
                self._watch_interrupts()
        self._thread = threading.Thread(target=self._report_notes, name="tfdist-preemption", daemon=True)
        self._thread.start()
        if self._metadata_address is not None:
            watched = (self._metadata_address, self._closing, self.note)
            threading.Thread(target=watch, args=watched, name="tfdist-metadata", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._wake is not None:
            writing, before = self._wake
            signal.set_wakeup_fd(before)
            writing.close()  # which ends the thread that reads
            self._wake = None
        for number, handler in self._old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
        self._old_handlers.clear()
        self._notes.put(None)
        if self._thread is not None:
            self._thread.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1 and self._abort is None:
                raise KeyboardInterrupt
        if self._first is None and self.reason is None:
            self._first = number
        hint = " A second Ctrl-C ends at once, without saving." if number == signal.SIGINT else ""
        self.note(f"{signal.Signals(number).name} was received", hint=hint)

    def _watch_interrupts(self) -> None:
        """Has a thread see each SIGINT as it comes, also while the main thread is inside TensorFlow."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        self._wake = (writing, signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False))
        threading.Thread(target=self._count_interrupts, args=(reading,), name="tfdist-interrupts", daemon=True).start()

    def _count_interrupts(self, reading: socket.socket) -> None:
        count = 0
        with reading:
            while received := reading.recv(64):
                count += received.count(signal.SIGINT)
                if count > 1 and self._abort is not None:
                    self._abort()

    def _report_notes(self) -> None:
        while (note := self._notes.get()) is not None:
            self._tell(note)


DEFAULT_ADDRESS = "metadata.google.internal"
PRODUCT_NAME_FILE = pathlib.Path("/sys/class/dmi/id/product_name")
# What each key says when this VM is about to end.
ENDING_VALUES = {
    "preempted": {"TRUE": "this VM is being preempted"},
    "maintenance-event": {"TERMINATE_ON_HOST_MAINTENANCE": "this VM will be terminated for maintenance of its host"},
}
POLL_SECONDS = 2.0  # a preempted VM has 30 seconds
ANSWER_SECONDS = 10
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def find_address(given: str | None = None, *, product_name_file: pathlib.Path = PRODUCT_NAME_FILE) -> str | None:
    """The server's `host` or `host:port`: the one given, or the usual one on a machine of Google's, or None."""
    if given:
        return given
    try:
        product = product_name_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return DEFAULT_ADDRESS if product.strip().startswith("Google") else None


def watch(address: str, closing: threading.Event, on_notice: Callable[[str], None]) -> None:
    """Asks again and again, until `closing` is set or the VM is about to end; a server that fails is asked on.

    Args:
      address: `host` or `host:port` of the server; proxies are not used, as Google's documentation asks.
      closing: ends it, after the request that it is in.
      on_notice: called at most once, with a clause such as "this VM is being preempted".
    """
    while not closing.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):
            reasons = [ENDING_VALUES[key].get(_request_value(address, key)) for key in ENDING_VALUES]
            if (reason := next(filter(None, reasons), None)) is not None:
                if not closing.is_set():
                    on_notice(reason)
                return
        closing.wait(POLL_SECONDS)


def _request_value(address: str, key: str) -> str:
    url = f"http://{address}/computeMetadata/v1/instance/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with _WITHOUT_PROXY.open(request, timeout=ANSWER_SECONDS) as answer:  # another status is an OSError
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise http.client.HTTPException(f"{url} is not answered by a metadata server")
        return str(answer.read().decode("utf-8", "replace").strip())
