"""A store that does not remove what is not needed any more: training does not wait for that, and hears of it once."""

from __future__ import annotations

import time

import pytest
from checkpoint.checkpoints import Listener, new_manager, state_of, steps
from gcs.faults import Fault
from gcs.server import GcsServer

from tfdist.checkpoint.catalog import list_checkpoints

pytestmark = pytest.mark.slow

DIRECTORY = "gs://bucket/run/checkpoints"


def test_a_bucket_that_refuses_to_delete_holds_nothing_up_and_is_told_once(gcs: GcsServer) -> None:
    listener = Listener()
    manager = new_manager(DIRECTORY, listener, keep_last=1)
    gcs.faults.add(Fault("status", method="DELETE", count=None))
    begun = time.monotonic()
    for step in range(1, 6):
        manager.save(state_of(step))
        manager.wait()
    assert time.monotonic() - begun < 120  # 60 s for each of many that are refused, if it were asked again as else
    assert steps(list_checkpoints(DIRECTORY)) == [1, 2, 3, 4, 5]
    warned = [event for event in listener.events("checkpoint_not_removed") if event[0] == "warning"]
    assert len(warned) == 1 and "this is said once" in warned[0][-1]
    gcs.faults.clear()
    manager.save(state_of(6))
    manager.close()
    assert steps(list_checkpoints(DIRECTORY)) == [6]
    assert not listener.events("checkpoint_failed")


def test_a_save_that_waits_goes_before_what_is_to_be_removed(gcs: GcsServer) -> None:
    manager = new_manager(DIRECTORY, Listener(), keep_last=1)
    gcs.faults.add(Fault("status", method="DELETE", count=None))
    for step in (1, 2):  # the second finds out, while nothing waits
        manager.save(state_of(step))
        manager.wait()
    asked = gcs.count("DELETE", "")
    for step in range(3, 12):
        manager.save(state_of(step))
    manager.close()
    assert gcs.count("DELETE", "") < 5 * asked  # not once for each of the nine
    assert steps(list_checkpoints(DIRECTORY)) == list(range(1, 12))
