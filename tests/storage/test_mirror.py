"""Local files that appear on gs://."""

from __future__ import annotations

import os
import pathlib
import threading

import pytest
from gcs.faults import Fault
from gcs.server import GcsServer

from tfdist.storage import files
from tfdist.storage.mirror import Mirror


def test_files_that_grow_are_stored_meanwhile_and_at_the_end(gcs: GcsServer) -> None:
    mirror = Mirror("gs://bucket/run/tensorboard", interval_seconds=0.02)
    path = pathlib.Path(mirror.local, "train", "events")
    path.parent.mkdir()
    for content in (b"one", b"one, two"):
        path.write_bytes(content)
        while not (gcs.buckets.names("bucket") and files.read("gs://bucket/run/tensorboard/train/events") == content):
            threading.Event().wait(0.01)
    path.write_bytes(b"one, two, three")
    mirror.close()
    mirror.close()
    assert files.read("gs://bucket/run/tensorboard/train/events") == b"one, two, three"
    assert not os.path.exists(mirror.local)
    assert gcs.count("POST", "uploadType") == 3  # what did not grow is not put again


@pytest.mark.slow
def test_a_last_put_that_fails_is_raised(gcs: GcsServer) -> None:
    mirror = Mirror("gs://bucket/run")
    pathlib.Path(mirror.local, "events").write_bytes(b"one")
    gcs.faults.add(Fault("status", status=403, count=None))
    with pytest.raises(PermissionError):
        mirror.close()
    assert not os.path.exists(mirror.local)
