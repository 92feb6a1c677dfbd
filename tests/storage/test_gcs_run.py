"""A whole run on gs://, data and configuration too, by a process that knows only STORAGE_EMULATOR_HOST."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from gcs.faults import Fault
from gcs.server import GcsServer
from processes import Running
from support import REPOSITORY, run_python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tfdist.checkpoint import catalog
from tfdist.storage import files

RUN = "gs://bucket/runs/digits"
GIN = """
from __gin__ import dynamic_registration
import tensorflow as tf
from tfdist.data.formats import array_files
from tfdist.data.sources import columns
from tfdist.data.formats import tfrecord

include 'configs/experiments/digits.gin'
include 'configs/strategies/one_device.gin'

train.epochs = 2
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
    for shard in range(2):
        path = scratch / f"train-{shard}"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for image, label in zip(images[shard::2], labels[shard::2], strict=True):
                feature = {
                    "image": tf.train.Feature(float_list=tf.train.FloatList(value=image.ravel())),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
        files.write_new(f"gs://bucket/data/train-{shard}", [path.read_bytes()])
    packed = io.BytesIO()
    np.savez(packed, images=images, labels=labels)
    files.write_new("gs://bucket/data/test.npz", [packed.getvalue()])


def fetch(directory: str, to: pathlib.Path) -> pathlib.Path:
    for name in files.list_tree(directory):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(files.read(files.join(directory, name)))
    return to


@pytest.mark.slow
def test_a_run_on_gs_leaves_all_that_a_local_one_does(gcs: GcsServer, tmp_path: pathlib.Path) -> None:
    upload_data(tmp_path)
    files.write_atomic("gs://bucket/small.gin", GIN)
    gcs.faults.add(
        Fault("lost_reply", method="POST", skip=2, count=2),
        Fault("reset_download", path="alt=media", skip=1, count=2),
        Fault("status", status=503, probability=0.1, count=5),
    )
    command = ["-m", "tfdist.main", "--gin_file=gs://bucket/small.gin", f"--run_dir={RUN}"]
    run_python(command, cwd=REPOSITORY, timeout=300, env={"XDG_CACHE_HOME": str(tmp_path / "cache")}).check()
    assert {asked.fault for asked in gcs.asked} >= {"lost_reply", "reset_download"}

    run = fetch(RUN, tmp_path / "run")
    contract = {"config.gin", "result.json", "metrics.jsonl", "events.jsonl", "tensorboard", "export"}
    assert contract <= {path.name for path in run.iterdir()}
    assert "train.epochs = 2" in (run / "config.gin").read_text()
    result = json.loads((run / "result.json").read_text())
    assert (result["epochs"], result["examples_seen"]) == (2, 200)
    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in points if point["split"] == "eval"][-1] == result["steps"] == 14
    events = (run / "events.jsonl").read_text().splitlines()
    assert len(events) == len(set(events)) > 1  # nothing is written twice
    assert "loss" in EventAccumulator(str(run / "tensorboard" / "train")).Reload().Tags()["tensors"]
    assert keras.saving.load_model(run / "export" / "model.keras").count_params() > 0

    again = run_python(command, cwd=REPOSITORY, timeout=300).check()
    assert "Nothing is left to train" in again.stdout


DIGITS = [
    *("-m", "tfdist.main", "--gin_file=configs/experiments/digits.gin"),
    *("--gin_param=train.epochs = 2", "--gin_param=train.deterministic = True"),
    *("--gin_param=from tfdist.checkpoint import policy", "--gin_param=train.checkpoint = @policy.CheckpointPolicy()"),
    "--gin_param=policy.CheckpointPolicy.every_steps = 1",
]
WEIGHTS = "export/model.keras"
KILLED_AT_COMMITS = (3, 14)  # of some 46; each start resumes from the last one


@pytest.mark.slow
def test_a_run_that_is_killed_on_gs_goes_on_through_every_kind_of_fault(gcs: GcsServer, tmp_path: pathlib.Path) -> None:
    run_python([*DIGITS, f"--run_dir={tmp_path / 'undisturbed'}"], cwd=REPOSITORY, timeout=200).check()
    for number, fault in enumerate(
        (
            Fault("status", status=429, path="uploadType", count=3),
            Fault("status", status=503, method="POST", path="uploadType", count=2),
            Fault("status", status=412, method="POST", path="ifGenerationMatch=0"),
            Fault("reset_upload", path="uploadType", count=2),
            Fault("lost_reply", method="POST", path="uploadType", count=4),
            Fault("stall_upload", path="uploadType", seconds=2.0),
            Fault("reset_download", path="alt=media", count=2),
        )
    ):
        gcs.faults.add(dataclasses.replace(fault, skip=5 + 3 * number))
    for commits in KILLED_AT_COMMITS:
        kill_after(commits, [*DIGITS, f"--run_dir={RUN}"], tmp_path / "log")
    last = run_python([*DIGITS, f"--run_dir={RUN}"], cwd=REPOSITORY, timeout=300).check()
    assert "Resuming at step" in last.stdout
    assert {asked.fault for asked in gcs.asked} >= {"status", "reset_upload", "lost_reply", "reset_download"}

    run = fetch(RUN, tmp_path / "run")
    ours, theirs = (keras.saving.load_model(d / WEIGHTS).get_weights() for d in (run, tmp_path / "undisturbed"))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    points = [(p["step"], p["split"]) for p in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert len(points) == len(set(points))
    checkpoints = catalog.list_checkpoints(f"{RUN}/checkpoints")
    assert checkpoints and all(catalog.verify(checkpoint) is None for checkpoint in checkpoints)  # none is torn
    assert len({checkpoint.step for checkpoint in checkpoints}) == len(checkpoints)  # and none there twice


def kill_after(commits: int, command: list[str], log: pathlib.Path) -> None:
    """Starts a training, and kills it once it has told of so many checkpoints."""
    with Running(
        [sys.executable, *command, "--gin_param=train.steps_per_call = 1"], log, directory=REPOSITORY
    ) as process:
        first = newest_step()
        process.until(lambda: newest_step() >= first + commits)


def newest_step() -> int:
    """Of the checkpoints that are committed."""
    kept = [checkpoint.step for checkpoint in catalog.list_checkpoints(f"{RUN}/checkpoints") if checkpoint.manifest]
    return max(kept, default=0)
