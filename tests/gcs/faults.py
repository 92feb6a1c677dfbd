"""Faults by request: which requests they meet, how often, and what then happens.

Invariant: a fault that says how often it comes, comes exactly so often, however many threads ask. The server asks
`Faults.meet` once for every request.
"""

from __future__ import annotations

import dataclasses
import re
import threading

STATUS = "status"  # answers with `status` and does nothing else
RESET_UPLOAD = "reset_upload"  # takes half of the body, then resets the connection
RESET_DOWNLOAD = "reset_download"  # sends half of the answer's body, then resets the connection
STALL_UPLOAD = "stall_upload"  # takes half of the body, and no more for `seconds`; then resets the connection
STALL_DOWNLOAD = "stall_download"  # sends half of the answer's body, and no more for `seconds`; then as above
LOST_REPLY = "lost_reply"  # does what was asked, then resets the connection instead of answering
SLOW_UPLOAD = "slow_upload"  # takes the body at `bytes_per_second`, and does what was asked
SLOW_ANSWER = "slow_answer"  # does what was asked, and answers after `seconds`
KINDS = (STATUS, RESET_UPLOAD, RESET_DOWNLOAD, STALL_UPLOAD, STALL_DOWNLOAD, LOST_REPLY, SLOW_UPLOAD, SLOW_ANSWER)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
      kind: of the names above.
      method: the request's, None for any.
      path: a regular expression that is searched in path and query as sent.
      skip: of the requests that match, so many go well first.
      count: so many are met then; None for all that follow.
      status: of the answer; 412, 429, 503 or any other.
      seconds: that a stall lasts, or an answer takes.
      bytes_per_second: of each slow upload.
    """

    kind: str
    method: str | None = None
    path: str = ""
    skip: int = 0
    count: int | None = 1
    status: int = 503
    seconds: float = 3600.0
    bytes_per_second: float = 1e6

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"There is no fault {self.kind!r}; there are {', '.join(KINDS)}")
        re.compile(self.path)


class Faults:
    """The faults that are set; may be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._set: list[tuple[Fault, list[int]]] = []  # with the numbers of those skipped and met

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._set += [(fault, [0, 0]) for fault in faults]

    def clear(self) -> None:
        with self._lock:
            self._set.clear()

    def meet(self, method: str, target: str) -> Fault | None:
        """The fault that this request meets: of those set, the first that is due."""
        with self._lock:
            for fault, seen in self._set:
                if fault.method not in (None, method) or not re.search(fault.path, target):
                    continue
                if seen[0] < fault.skip:
                    seen[0] += 1
                elif fault.count is None or seen[1] < fault.count:
                    seen[1] += 1
                    return fault
        return None
