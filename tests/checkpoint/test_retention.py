"""Which checkpoints stay, as a rule and on the disk."""

from __future__ import annotations

import pathlib

import pytest
from checkpoint.checkpoints import new_manager, state_of, steps

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
    expired = catalog.expired(entries, CheckpointPolicy(**settings), newest=entries[-1])
    assert steps([each for each in entries if each not in expired]) == kept


def test_of_equally_good_checkpoints_the_newest_stays_and_nan_is_never_best() -> None:
    entries = [entry(10, val_loss=1.0), entry(20, val_loss=1.0), entry(30, val_loss=float("nan")), entry(40)]
    expired = catalog.expired(entries, CheckpointPolicy(keep_last=1, keep_best="val_loss"), newest=entries[-1])
    assert steps(expired) == [10, 30]


def test_damaged_manifests_go_and_what_is_being_written_is_not_touched() -> None:
    damaged, in_flight = Entry(10, "a", None, "cut off"), Entry(40, "b", None, NO_MANIFEST)
    newest = entry(30)
    assert catalog.expired([damaged, newest, in_flight], CheckpointPolicy(), newest=newest) == [damaged]


@pytest.mark.slow
def test_the_manager_prunes_after_each_commit_and_knows_what_earlier_runs_left(tmp_path: pathlib.Path) -> None:
    settings = {"keep_last": 2, "keep_every_steps": 30, "keep_best": "val_loss"}
    for first in (10, 40):
        manager = new_manager(tmp_path, on_error="stop", **settings)
        for step in range(first, first + 30, 10):
            manager.save(state_of(step), metrics={"val_loss": abs(step - 20)})
        manager.close()
    assert steps(list_checkpoints(str(tmp_path))) == [20, 30, 50, 60]
