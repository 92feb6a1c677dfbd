"""Takes note of SIGTERM and Ctrl-C, for a process that has to let its trials save before it leaves.

Invariant: a second Ctrl-C does not wait. Used by the chief of a sweep and by its workers.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from tfdist.errors import PreemptedError


class Leaving:
    """Whether this process has been told to leave."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @property
    def is_told(self) -> bool:
        return self._signal is not None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Takes note of signals from here on; raises KeyboardInterrupt at the second SIGINT."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def leave_if_told(self, message: str) -> None:
        """Raises KeyboardInterrupt or PreemptedError."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise PreemptedError(message)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
