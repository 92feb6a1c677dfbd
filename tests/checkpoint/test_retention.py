"""Which checkpoints stay, as a rule, on a disk, and in a bucket that does not remove what is not needed any more."""

from __future__ import annotations

import pathlib
import time

import pytest
from checkpoint.checkpoints import Listener, new_manager, state_of, steps
from gcs.faults import Fault
from gcs.server import GcsServer

from tfdist.checkpoint import catalog
from tfdist.checkpoint.catalog import NO_MANIFEST, Entry, list_checkpoints
from tfdist.checkpoint.format.manifest import Manifest
from tfdist.checkpoint.policy import CheckpointPolicy


def entry(step: int, *, created: str = "2026", **metrics: float) -> Entry:
    manifest = Manifest(step, created, {}, metrics, {}, (), 0, 0)
    return Entry(step, f"checkpoints/step-{step}-{created}", manifest)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_last": 1}, [90]),
        ({"keep_last": 3}, [70, 80, 90]),
        ({"keep_last": 100}, [10, 20, 30, 40, 50, 60, 70, 80, 90]),
        ({"keep_last": 1, "keep_every_steps": 40}, [40, 80, 90]),
        ({"keep_last": 2, "keep_best": "val_loss"}, [30, 80, 90]),
        ({"keep_last": 1, "keep_best": "val_accuracy"}, [50, 90]),
        ({"keep_last": 1, "keep_best": "other_loss"}, [90]),
    ],
)
def test_the_policy_says_what_stays(settings: dict[str, object], kept: list[int]) -> None:
    entries = [entry(step, val_loss=abs(step - 30), val_accuracy=-abs(step - 50)) for step in range(10, 100, 10)]
    expired = catalog.find_expired(entries, CheckpointPolicy(**settings), newest=entries[-1])
    assert steps([each for each in entries if each not in expired]) == kept


def test_of_equally_good_checkpoints_the_newest_stays_and_nan_is_never_best() -> None:
    entries = [entry(10, val_loss=1.0), entry(20, val_loss=1.0), entry(30, val_loss=float("nan")), entry(40)]
    expired = catalog.find_expired(entries, CheckpointPolicy(keep_last=1, keep_best="val_loss"), newest=entries[-1])
    assert steps(expired) == [10, 30]


def test_damaged_manifests_go_and_what_is_being_written_is_not_touched() -> None:
    damaged, in_flight = Entry(10, "a", None, "cut off"), Entry(40, "b", None, NO_MANIFEST)
    newest = entry(30)
    assert catalog.find_expired([damaged, newest, in_flight], CheckpointPolicy(), newest=newest) == [damaged]


@pytest.mark.slow
def test_the_manager_prunes_after_each_commit_and_knows_what_earlier_runs_left(tmp_path: pathlib.Path) -> None:
    settings = {"keep_last": 2, "keep_every_steps": 30, "keep_best": "val_loss"}
    for first in (10, 40):
        manager = new_manager(tmp_path, on_error="stop", **settings)
        for step in range(first, first + 30, 10):
            manager.save(state_of(step), metrics={"val_loss": abs(step - 20)})
        manager.close()
    assert steps(list_checkpoints(str(tmp_path))) == [20, 30, 50, 60]


DIRECTORY = "gs://bucket/run/checkpoints"


@pytest.mark.slow
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
