"""Takes note of SIGTERM, SIGHUP and Ctrl-C, for a process that has to let its trials save before it leaves.

Invariant: the first Ctrl-C is as SIGTERM, the second does not wait. SIGHUP stays ignored where it was, as under nohup.
Used by the chief of a sweep and by its workers.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from tfdist.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, PreemptedError


class Leaving:
    """Whether this process has been told to leave."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @property
    def is_told(self) -> bool:
        return self._signal is not None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Takes note of signals from here on; raises KeyboardInterrupt at SIGINT behind any of them."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def leave_if_told(self, message: str) -> None:
        """Raises PreemptedError with the message."""
        if self._signal is not None:
            status = EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_PREEMPTED
            raise PreemptedError(message, exit_status=status)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
