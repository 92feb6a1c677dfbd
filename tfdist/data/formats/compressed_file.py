"""Reads ranges of what a gzip or zlib file holds, without unpacking it from the start each time.

A packed file can only be unpacked from its start. On the way the state of the decoder is kept every few megabytes, and
a later range is unpacked from the state before it. So a file is read once up to the furthest range asked for, and after
that each range costs at most one such distance. The states of a file take some three megabytes at most.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
import zlib
from typing import Any

from tfdist.data.formats.byte_ranges import read_range

WINDOW_BITS = {"GZIP": 31, "ZLIB": 15}
CHUNK_BYTES = 1 << 16
FIRST_DISTANCE_BYTES = 1 << 22
MOST_STATES = 64


@dataclasses.dataclass(frozen=True)
class _State:
    """A decoder that has unpacked the first `packed` bytes of the file to `plain` bytes."""

    plain: int
    packed: int
    decoder: Any


class CompressedFile:
    """One file; may be used by several threads.

    Args:
      path: local or gs://.
      compression: "GZIP" or "ZLIB".

    Attributes:
      problem: why the file could not be unpacked to its end, once that was tried; None if it could.
    """

    def __init__(self, path: str, compression: str) -> None:
        self._path = path
        self.compression = compression
        self._bits = WINDOW_BITS[compression]
        self._lock = threading.Lock()
        self._states = [_State(0, 0, zlib.decompressobj(self._bits))]
        self._distance = FIRST_DISTANCE_BYTES
        self.problem: str | None = None
        self._return_to(self._states[0])

    def read(self, first: int, count: int) -> bytes:
        """Unpacked bytes first … first + count - 1; fewer where the content ends, or cannot be unpacked, before."""
        with self._lock:
            pieces = []
            begin = self._last.plain - len(self._last_plain)
            if begin <= first <= self._last.plain:
                pieces.append(self._last_plain[first - begin : first - begin + count])
            else:
                nearest = self._states[bisect.bisect_right(self._states, first, key=lambda state: state.plain) - 1]
                if first < begin or nearest.plain > self._last.plain:
                    self._return_to(nearest)
            wanted = count - sum(map(len, pieces))
            while wanted > 0 and self._advance():
                begin = self._last.plain - len(self._last_plain)
                if self._last.plain > first:
                    pieces.append(self._last_plain[max(0, first - begin) :][:wanted])
                    wanted -= len(pieces[-1])
            return b"".join(pieces)

    @property
    def reached(self) -> int:
        """How many bytes have been unpacked; all there are, once a read came back short."""
        return self._last.plain

    def _return_to(self, state: _State) -> None:
        self._last = dataclasses.replace(state, decoder=state.decoder.copy())
        self._last_plain = b""

    def _advance(self) -> bool:
        """Unpacks the next chunk; False at the end."""
        state = self._last
        packed = read_range(self._path, state.packed, CHUNK_BYTES)
        decoder = state.decoder
        if not packed:
            if not decoder.eof:
                self.problem = "it ends in the middle of the compressed stream"
            return False
        if decoder.eof:  # another member follows
            decoder = zlib.decompressobj(self._bits)
        try:
            plain = decoder.decompress(packed)
        except zlib.error as error:
            if not state.decoder.eof:  # what stands behind a whole stream is no part of it
                self.problem = str(error)
            return False
        used = len(packed) - len(decoder.unused_data)
        self._last = _State(state.plain + len(plain), state.packed + used, decoder)
        self._last_plain = plain
        if self._last.plain >= self._states[-1].plain + self._distance and not decoder.eof:
            self._keep_state()
        return True

    def _keep_state(self) -> None:
        self._states.append(dataclasses.replace(self._last, decoder=self._last.decoder.copy()))
        if len(self._states) > MOST_STATES:
            self._states = self._states[::2]
            self._distance *= 2
