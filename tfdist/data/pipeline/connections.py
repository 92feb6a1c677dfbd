"""The connection between a training worker and a data service, as both ends use it.

Invariant: reading is bounded in time and in bytes, and an end that vanishes without a word, such as a machine that lost
its power, is noticed. `serving.py` and `served.py` call this.
"""

from __future__ import annotations

import socket
import time

IDLE_SECONDS, PROBE_SECONDS, MOST_PROBES = 30, 10, 6
_PIECE_BYTES = 1 << 16


def keep_alive(connection: socket.socket) -> None:
    """Has the system ask an end that is silent whether it is still there; tcp(7)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", IDLE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", MOST_PROBES),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def read_line(connection: socket.socket, seconds: float, most_bytes: int) -> bytes:
    """The line that comes within so many seconds; nothing may stand behind it.

    Raises:
      OSError: it did not come, or the connection broke.
      ValueError: it is longer than `most_bytes`, or has no end.
    """
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"nothing whole came in {seconds:g} s")
        connection.settimeout(left)
        piece = connection.recv(min(_PIECE_BYTES, most_bytes + 1 - len(line)))
        if not piece:
            raise ConnectionResetError("it was closed in the middle of a line" if line else "it was closed at once")
        line += piece
        if len(line) > most_bytes:
            raise ValueError(f"the line is longer than {most_bytes:,} bytes")
    return line
