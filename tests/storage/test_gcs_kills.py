"""Uploads and runs on gs:// that are killed, by processes that know only STORAGE_EMULATOR_HOST."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from crashes.runs import TOTAL_STEPS, TWO_REPLICAS, Process, Run
from equivalence.runs import assert_same_bits, load_weights
from gcs.faults import Fault
from gcs.server import GcsServer
from processes import Running
from record_files_support import example, write_records
from support import REPOSITORY, clean_environment, run_python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tfdist.checkpoint import catalog
from tfdist.storage import files

pytestmark = pytest.mark.slow

OBJECTS = "/b/bucket/o"
NUM_BYTES = 5 << 19
WRITE = f"""
from tfdist.storage import files
files.write_new("gs://bucket/run/large", [b"x" * {NUM_BYTES}])
"""


@pytest.mark.parametrize(("moment", "expected"), [("stall_upload", []), ("stall_download", ["large"])])
def test_a_kill_before_or_after_the_server_acts_leaves_no_object_or_a_whole_one(
    gcs: GcsServer, moment: str, expected: list[str]
) -> None:
    gcs.faults.add(Fault(moment, path=OBJECTS))
    with subprocess.Popen([sys.executable, "-c", WRITE], env=clean_environment()) as writer:
        while not any(asked.fault for asked in gcs.asked) and writer.poll() is None:
            time.sleep(0.005)
        writer.kill()
    gcs.faults.clear()
    assert files.list_tree("gs://bucket/run") == expected
    assert not expected or files.read("gs://bucket/run/large") == b"x" * NUM_BYTES


RUN = "gs://bucket/runs/digits"
CHECKPOINTS = f"{RUN}/checkpoints"
GIN = """
from __gin__ import dynamic_registration
import tensorflow as tf
from tfdist.checkpoint import policy
from tfdist.data.formats import array_files
from tfdist.data.sources import columns
from tfdist.data.formats import tfrecord

include 'configs/experiments/digits.gin'
include 'configs/strategies/one_device.gin'

train.epochs = 4
train.deterministic = True
train.checkpoint = @policy.CheckpointPolicy()
policy.CheckpointPolicy.every_steps = 1
train.global_batch_size = 16
train.train_data = @train/tfrecord.TFRecordSource
train/tfrecord.TFRecordSource.files = 'gs://bucket/data/train-*'
tfrecord.TFRecordSource.features = {
    'image': @tf.io.FixedLenFeature(shape=(8, 8, 1), dtype='float32'),
    'label': @tf.io.FixedLenFeature(shape=(), dtype='int64'),
}
tfrecord.TFRecordSource.columns = @columns.Columns()
columns.Columns.inputs = 'image'
columns.Columns.targets = 'label'
train.eval_data = @test/array_files.ArrayFiles
test/array_files.ArrayFiles.path = 'gs://bucket/data/test.npz'
array_files.ArrayFiles.inputs = 'images'
array_files.ArrayFiles.targets = 'labels'
"""


def upload_data(scratch: pathlib.Path) -> None:
    """100 random digits as two TFRecord files and as an .npz file."""
    random = np.random.default_rng(0)
    images = random.random((100, 8, 8, 1), np.float32)
    labels = random.integers(0, 10, 100)
    rows = zip(images, labels, strict=True)
    records = [example(image=image.ravel().tolist(), label=int(label)) for image, label in rows]
    for shard in range(2):
        path = write_records(scratch / f"train-{shard}", records[shard::2])
        files.write_new(f"gs://bucket/data/train-{shard}", [path.read_bytes()])
    packed = io.BytesIO()
    np.savez(packed, images=images, labels=labels)
    files.write_new("gs://bucket/data/test.npz", [packed.getvalue()])


def fetch(directory: str, to: pathlib.Path) -> pathlib.Path:
    for name in files.list_tree(directory):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(files.read(files.join(directory, name)))
    return to


TRAIN = ["-m", "tfdist.main", "--gin_file=gs://bucket/small.gin"]
KILLED_AT_COMMITS = (3, 8)  # of some 28; each start resumes from the last one


def test_a_run_that_is_killed_on_gs_goes_on_through_every_kind_of_fault(gcs: GcsServer, tmp_path: pathlib.Path) -> None:
    """Data and configuration are in the bucket, too; it leaves all that a local one does, to the same bits."""
    upload_data(tmp_path)
    files.write_atomic("gs://bucket/small.gin", GIN)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def train(run_dir: str) -> str:
        return run_python([*TRAIN, f"--run_dir={run_dir}"], cwd=REPOSITORY, timeout=300, env=cache).check().stdout

    train(str(tmp_path / "undisturbed"))
    for number, fault in enumerate(
        (
            Fault("status", status=429, path="uploadType", count=3),
            Fault("status", status=503, method="POST", path="uploadType", count=2),
            Fault("status", status=412, method="POST", path="ifGenerationMatch=0"),
            Fault("reset_upload", path="uploadType", count=2),
            Fault("lost_reply", method="POST", path="uploadType", count=4),
            Fault("stall_upload", path="uploadType", seconds=2.0),
        )
    ):
        gcs.faults.add(dataclasses.replace(fault, skip=5 + 3 * number))
    gcs.faults.add(Fault("reset_download", path="alt=media", skip=1, count=2))
    for commits in KILLED_AT_COMMITS:
        command = [sys.executable, *TRAIN, f"--run_dir={RUN}", "--gin_param=train.steps_per_call = 1"]
        with Running(command, tmp_path / "log", cache, REPOSITORY) as process:
            first = newest_step(CHECKPOINTS)
            process.until(lambda least=first + commits: newest_step(CHECKPOINTS) >= least)
    assert f"Resuming at step {newest_step(CHECKPOINTS):,}" in train(RUN)
    assert {asked.fault for asked in gcs.asked} >= {"status", "reset_upload", "lost_reply", "reset_download"}

    checkpoints = catalog.list_checkpoints(CHECKPOINTS)
    assert checkpoints and all(catalog.verify(checkpoint) is None for checkpoint in checkpoints)  # none is torn
    assert len({checkpoint.step for checkpoint in checkpoints}) == len(checkpoints)  # and none there twice
    run = fetch(RUN, tmp_path / "run")
    assert_same_bits(load_weights(run), load_weights(tmp_path / "undisturbed"))
    assert {"config.gin", "tensorboard"} <= {path.name for path in run.iterdir()}
    assert "train.epochs = 4" in (run / "config.gin").read_text()
    result = json.loads((run / "result.json").read_text())
    assert (result["epochs"], result["examples_seen"]) == (4, 400)
    points = [(p["step"], p["split"]) for p in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert len(points) == len(set(points))
    assert [step for step, split in points if split == "eval"][-1] == result["steps"] == 28
    events = (run / "events.jsonl").read_text().splitlines()
    assert len(events) == len(set(events)) > 1  # nothing is written twice
    assert "loss" in EventAccumulator(str(run / "tensorboard" / "train")).Reload().Tags()["tensors"]
    assert "Nothing is left to train" in train(RUN)


def newest_step(checkpoints: str) -> int:
    """Of the checkpoints that are committed."""
    return max((each.step for each in catalog.list_checkpoints(checkpoints) if each.manifest), default=0)


# A backup of Keras's


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
            process.until(lambda step=step: newest_step(BACKUP) >= step)
            process.kill_all()
            process.wait()
    saved = newest_step(BACKUP)
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
