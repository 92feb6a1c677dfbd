"""Checksums in pieces and in parts are those of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.backup.checksum import crc32c, joined
from tfdist.storage import contents

DATA = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)


def test_the_published_example() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_pieces_give_the_checksum_of_the_whole() -> None:
    assert crc32c(DATA[:7], DATA[7:]) == contents.crc32c(DATA)


@pytest.mark.parametrize("cut", [0, 1, 4096, 1_500_000, 3_000_000, 3_000_001])
def test_two_parts_checksums_give_that_of_both(cut: int) -> None:
    first, second = DATA[:cut], DATA[cut:]
    assert joined(crc32c(first), crc32c(second), second.nbytes) == crc32c(DATA)
