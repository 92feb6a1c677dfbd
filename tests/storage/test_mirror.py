"""Local files that appear on gs://."""

from __future__ import annotations

import os
import pathlib
import threading

import pytest
from gcs.faults import Fault
from gcs.server import GcsServer

from tfdist.storage import files


def test_files_that_grow_are_stored_meanwhile_and_at_the_end(gcs: GcsServer) -> None:
    mirror = files.open_mirror("gs://bucket/run/tensorboard", interval_seconds=0.02)
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
    mirror = files.open_mirror("gs://bucket/run")
    pathlib.Path(mirror.local, "events").write_bytes(b"one")
    gcs.faults.add(Fault("status", status=403, count=None))
    with pytest.raises(PermissionError):
        mirror.close()
    assert not os.path.exists(mirror.local)


def test_a_log_puts_the_first_line_soon_and_the_rest_when_closed(gcs: GcsServer) -> None:
    path = "gs://bucket/run/log"
    files.write_atomic(path, b"earlier\ntorn")
    log = files.open_log(path, flush_seconds=3600)
    log.write_line("0")
    while files.read(path) != b"earlier\ntorn\n0\n":
        threading.Event().wait(0.01)
    for n in range(1, 500):
        log.write_line(str(n))
    log.close()
    log.close()
    assert files.read(path) == b"earlier\ntorn\n" + b"".join(b"%d\n" % n for n in range(500))
    assert gcs.count("POST", "uploadType") == 3
    with pytest.raises(ValueError, match="closed"):
        log.write_line("late")


def test_a_put_that_failed_is_said_and_made_good_by_the_next(gcs: GcsServer, caplog: pytest.LogCaptureFixture) -> None:
    gcs.faults.add(Fault("status", status=403, method="POST"))
    log = files.open_log("gs://bucket/run/log", flush_seconds=0.01)
    log.write_line("line")
    while "could not be stored" not in caplog.text:
        threading.Event().wait(0.01)
    log.close()
    assert files.read("gs://bucket/run/log") == b"line\n"
