"""Replicas drop different units; the first draws what one device would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from training.checks import drawn_masks

from tfdist.strategies.one_device import OneDevice

pytestmark = pytest.mark.slow


def test_replicas_draw_apart_and_the_first_as_one_device(mirrored: Callable[[str], Any]) -> None:
    strategy = OneDevice()
    strategy.connect()
    alone = drawn_masks(strategy)
    both = mirrored("masks")
    assert [call[0] for call in both] == [call[0] for call in alone]
    rows = [row for call in both for mask in call for row in mask]
    assert len({tuple(row) for row in rows}) == len(rows) == 8
