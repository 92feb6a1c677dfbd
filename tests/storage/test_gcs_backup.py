"""A run in a local directory that keras.callbacks.BackupAndRestore saves to gs://, killed and started again."""

from __future__ import annotations

import pathlib

import pytest
from crashes.runs import TOTAL_STEPS, TWO_REPLICAS, Process, Run
from gcs.server import GcsServer

from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.storage import files

pytestmark = pytest.mark.slow

BACKUP = "gs://bucket/backup"
BACKED_UP = (
    "from crashes import experiment",
    "import keras",
    "train.callbacks = [@keras.callbacks.EarlyStopping(), @keras.callbacks.ReduceLROnPlateau(), @experiment.Paced(), "
    "@keras.callbacks.BackupAndRestore()]",
    f"keras.callbacks.BackupAndRestore.backup_dir = '{BACKUP}'",
    "keras.callbacks.BackupAndRestore.save_freq = 1",  # as the policy of the experiment says, too
)
KILLED_AT = (9, 26)


@pytest.mark.parametrize("strategy", ["one_device", "multi_worker"])
def test_a_run_that_is_killed_goes_on_from_its_backup_and_ends_as_if_it_was_not(
    gcs: GcsServer, tmp_path: pathlib.Path, strategy: str
) -> None:
    run, undisturbed = Run(tmp_path / "run"), Run(tmp_path / "undisturbed")
    for step in KILLED_AT:
        with Process(run, strategy, *BACKED_UP) as process:
            process.until(lambda step=step: newest_step() >= step)
            process.kill_all()
            process.wait()
    saved = newest_step()
    assert saved < TOTAL_STEPS and not run.is_finished
    with Process(run, strategy, *BACKED_UP) as process:
        assert process.wait() == 0, process.output
        assert [event["step"] for event in process.new_events("resumed")] == [saved]
    assert files.list_tree(BACKUP) == []
    with Process(undisturbed, "mirrored" if strategy in TWO_REPLICAS else strategy) as process:
        assert process.wait() == 0, process.output
    weights, expected = run.weights(), undisturbed.weights()
    assert weights.keys() == expected.keys()
    assert all(weights[name].tobytes() == expected[name].tobytes() for name in weights)
    assert run.points() == undisturbed.points()
    assert not run.checkpoints.exists()


def newest_step() -> int:
    """Of the checkpoints that are committed."""
    return max((entry.step for entry in list_checkpoints(BACKUP) if entry.manifest is not None), default=0)
