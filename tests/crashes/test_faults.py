"""The shorter form of tools/crash_test.py --faults: one of each."""

from __future__ import annotations

import pathlib
import random

import pytest
from crashes.faults import BUCKET, DISK, FAULTS, Plan, Torture, can_mount

EVER = 300.0  # seconds
ON_A_DISK: list[Plan] = [{"disk": (0.0, EVER)}, {"kill": (2.0, 0.0)}, {"fork": (0.0, EVER)}]
IN_A_BUCKET: list[Plan] = [
    {"term": (2.0, 0.0)},
    {"503": (0.0, 3.0), "clock": (2.0, EVER), "slow": (4.0, 3.0), "silent": (7.0, 3.0)},
]


@pytest.mark.slow
def test_faults_of_every_kind_leave_a_run_as_if_they_had_not_come(tmp_path: pathlib.Path) -> None:
    torture = Torture(tmp_path, random.Random(3), print)
    may_fill = can_mount(tmp_path)  # else training/test_full_disk.py alone has a disk fill
    torture.disturb("train", DISK if may_fill else None, ON_A_DISK[0 if may_fill else 1 :])
    torture.disturb("train", BUCKET, IN_A_BUCKET)
    assert not torture.problems
    assert {"kill", "fork", "term", "503", "clock"} <= {fault for fault, _ in torture.counts} <= FAULTS.keys()
