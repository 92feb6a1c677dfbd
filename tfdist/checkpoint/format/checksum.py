"""CRC32C of many bytes, without keeping the other threads of the process from running.

Invariant: the result is that of `contents.crc32c`. The library holds Python's lock while it computes, so it gets the
bytes in small pieces (about a tenth of a millisecond each), and gives the lock away between them. The writer and
restore use this.
"""

from __future__ import annotations

import time

from tfdist.storage import contents

_PIECE_BYTES = 2**20


def crc32c(*parts: contents.Buffer) -> int:
    """The checksum of all parts together."""
    checksum = 0
    for view in contents.views(parts):
        for first in range(0, view.nbytes, _PIECE_BYTES):
            checksum = contents.crc32c(view[first : first + _PIECE_BYTES], seed=checksum)
            time.sleep(0)
    return checksum
