"""Checksums in pieces and in parts are those of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from tfdist.checkpoint.format.stored_files import crc32c
from tfdist.storage import contents

DATA = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)


def test_the_published_example() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.slow
def test_pieces_give_the_checksum_of_the_whole() -> None:
    assert crc32c(DATA[:7], DATA[7:]) == contents.crc32c(DATA)
