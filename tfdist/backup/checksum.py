"""CRC32C of many bytes, without keeping the other threads of the process from running.

Invariant: the result is that of `contents.crc32c`. The library holds Python's lock while it computes, so it gets the
bytes in small pieces (about a tenth of a millisecond each), and gives the lock away between them. The writer and
restore use this.
"""

from __future__ import annotations

import functools
import time

from tfdist.storage import contents

_PIECE_BYTES = 2**20
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, x^31 in the lowest bit
_ONE, _X = 0x80000000, 0x40000000  # x^0 and x^1


def crc32c(*parts: contents.Buffer) -> int:
    """The checksum of all parts together."""
    checksum = 0
    for view in contents.views(parts):
        for first in range(0, view.nbytes, _PIECE_BYTES):
            checksum = contents.crc32c(view[first : first + _PIECE_BYTES], seed=checksum)
            time.sleep(0)
    return checksum


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two parts one behind the other, from theirs and the size of the second.

    A checksum is a remainder of polynomials over two elements: the first one's is multiplied by x^(8 · second_bytes)
    and the second one's added (https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4 has the polynomial).
    """
    return _times(_power_of_x(8 * second_bytes), first) ^ second


@functools.lru_cache(maxsize=64)
def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _X
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square, exponent = _times(square, square), exponent >> 1
    return power


def _times(one: int, other: int) -> int:
    product, bit = 0, _ONE
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product
