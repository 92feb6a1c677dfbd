"""A whole run on gs://, data and configuration too, by a process that knows only STORAGE_EMULATOR_HOST."""

from __future__ import annotations

import io
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from gcs.faults import Fault
from gcs.server import GcsServer
from support import REPOSITORY, run_python
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tfdist.storage import files

RUN = "gs://bucket/runs/digits"
GIN = """
from __gin__ import dynamic_registration
from tfdist.data import array_files
from tfdist.data import columns
from tfdist.data import tfrecord

include 'configs/experiments/digits.gin'
include 'configs/strategies/one_device.gin'

train.epochs = 2
train.global_batch_size = 16
TRAIN_DATA = @train/tfrecord.TFRecordSource
train/tfrecord.TFRecordSource.files = 'gs://bucket/data/train-*'
tfrecord.TFRecordSource.features = {'image': ('fixed', (8, 8, 1), 'float32'), 'label': ('fixed', (), 'int64')}
tfrecord.TFRecordSource.columns = @columns.Columns()
columns.Columns.inputs = 'image'
columns.Columns.targets = 'label'
EVAL_DATA = @test/array_files.ArrayFiles
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
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert len(events) == len(set(events)) > 1  # nothing is written twice
    assert "loss" in EventAccumulator(str(run / "tensorboard" / "train")).Reload().Tags()["tensors"]
    assert keras.saving.load_model(run / "export" / "model.keras").count_params() > 0

    again = run_python(command, cwd=REPOSITORY, timeout=300)
    assert again.status == 2
    assert "holds a finished run" in again.stderr
