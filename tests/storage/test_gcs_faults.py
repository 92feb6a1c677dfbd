"""gs:// under faults: what was asked happens once and whole, or the failure names the path within seconds."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import socket
import sys
import threading
import time

import numpy as np
import pytest
from gcs import json_api
from gcs.faults import Fault
from gcs.server import GcsServer
from support import PATIENCE, run_python

from tfdist.command_line import exit_status_of
from tfdist.data.formats import input_files
from tfdist.data.sources import failures
from tfdist.errors import (
    EXIT_STORE_UNAVAILABLE,
    EXIT_USER_ERROR,
    StoreUnavailableError,
    UserError,
    exit_status_of_error,
)
from tfdist.storage import files, gcs, gcs_requests, gcs_transfers
from tfdist.storage.troubles import check_writable

PATH = "gs://bucket/run/file"
SMALL, LARGE = 1000, (1 << 20) * 5 // 2  # read in one request, and in ten
UPLOAD, DOWNLOAD = "uploadType", "alt=media"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large reads begin at a quarter of a megabyte; a stall is one after half a second."""
    monkeypatch.setattr(gcs_transfers, "RANGE_BYTES", 1 << 18)
    for module in (gcs, gcs_transfers):
        monkeypatch.setattr(module, "TIMEOUT", (0.5, 0.5))


def content(num_bytes: int) -> np.ndarray:
    return np.frombuffer(os.urandom(num_bytes), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=503, count=2),
        Fault("status", status=429, count=2),
        Fault("status", status=408),
        Fault("reset_upload", count=2),
        Fault("stall_upload"),
        Fault("lost_reply", count=2),
        Fault("stall_download", method="POST"),  # of the answer to an upload
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_a_new_object_is_made_once_and_whole_under_faults(gcs: GcsServer, fault: Fault) -> None:
    data = content(LARGE)
    gcs.faults.add(dataclasses.replace(fault, path="/b/bucket/o"))
    assert files.write_new(PATH, [data[:10], data[10:]]) == LARGE
    assert gcs.buckets.names("bucket") == ["run/file"]
    assert files.read(PATH) == data.tobytes()
    assert any(asked.fault for asked in gcs.asked)
    with pytest.raises(FileExistsError):
        files.write_new(PATH, [data])


@pytest.mark.slow
def test_a_lost_reply_is_no_excuse_for_anothers_object(gcs: GcsServer) -> None:
    """The first try is lost on its way there, and another writer makes the same bytes in the meantime."""
    data = content(SMALL)
    gcs.faults.add(Fault("status", path=UPLOAD, count=3))
    raised = []

    def write() -> None:
        try:
            files.write_new(PATH, [data])
        except FileExistsError as error:
            raised.append(error)

    late = threading.Thread(target=write)
    late.start()
    while not any(asked.fault for asked in gcs.asked):
        time.sleep(0.001)
    gcs.buckets.put("bucket", "run/file", data.tobytes())
    late.join()
    assert [error.filename for error in raised] == [PATH]
    assert gcs.buckets.names("bucket") == ["run/file"]


def test_no_thread_of_the_library_asks_for_the_bucket_and_draws_from_the_generator(gcs: GcsServer) -> None:
    gcs.faults.add(Fault("status", path="/b/bucket[?]", count=3))
    generator, threads = random.getstate(), {*threading.enumerate()}
    assert files.list_names("gs://bucket/run") == []
    for thread in {*threading.enumerate()} - threads:
        thread.join(1.0)
    assert random.getstate() == generator
    assert {asked.target.partition("?")[0] for asked in gcs.asked} == {"/storage/v1/b/bucket/o"}


def test_a_refused_precondition_is_an_existing_file_at_once(gcs: GcsServer) -> None:
    gcs.faults.add(Fault("status", status=412, path=UPLOAD))
    with pytest.raises(FileExistsError):
        files.write_new(PATH, [content(SMALL)])
    assert gcs.buckets.names("bucket") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault("reset_download", path=DOWNLOAD, count=3),
        Fault("stall_download", path=DOWNLOAD),
        Fault("status", status=503, path=DOWNLOAD, count=2),
        Fault("lost_reply", path=DOWNLOAD, count=2),
    ],
    ids=lambda fault: fault.kind,
)
@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
def test_a_read_is_whole_under_faults(gcs: GcsServer, num_bytes: int, fault: Fault) -> None:
    data = content(num_bytes)
    files.write_atomic(PATH, data.tobytes())
    buffer = np.zeros(num_bytes, np.uint8)
    gcs.faults.add(fault)
    files.read_into(PATH, buffer)
    assert np.array_equal(buffer, data)
    gcs.faults.clear()
    gcs.faults.add(fault)
    assert files.read(PATH) == data.tobytes()
    assert files.read_range(PATH, 3, num_bytes) == data[3:].tobytes()
    gcs.faults.clear()
    gcs.faults.add(fault)  # what has come is not asked for again, or no half would ever do
    assert files.read_range(PATH, 0, num_bytes) == data.tobytes()


@pytest.mark.slow
def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(gcs: GcsServer) -> None:
    files.write_atomic(PATH, b"old" * 100_000)
    gcs.faults.add(Fault("stall_download", path=DOWNLOAD, seconds=0.3))
    buffer = np.zeros(300_000, np.uint8)
    replace = threading.Thread(target=lambda: files.write_atomic(PATH, b"new" * 100_000))
    replace.start()
    try:
        files.read_into(PATH, buffer)
    except OSError as error:
        assert "replaced or removed" in str(error)
    else:
        assert buffer.tobytes() in (b"old" * 100_000, b"new" * 100_000)
    replace.join()
    assert files.read(PATH) == b"new" * 100_000


@pytest.mark.slow
def test_listing_goes_through_all_pages_also_under_faults(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_api, "MOST_LISTED", 7)
    names = [f"{n:03}" for n in range(40)]
    for name in names:
        gcs.buckets.put("bucket", f"run/d/{name}", b"")
    gcs.faults.add(Fault("status", path="pageToken", skip=1, count=2), Fault("lost_reply", path="pageToken", skip=3))
    assert files.list_tree("gs://bucket/run/d") == names
    assert files.list_names("gs://bucket/run/d") == names
    assert gcs.count("GET", "prefix=run") >= 2 * 6 + 3
    files.remove_tree("gs://bucket/run")
    assert gcs.buckets.names("bucket") == []


@pytest.mark.slow
def test_an_upload_that_breaks_after_a_long_while_of_sending_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_requests, "_BUSY_PATIENCE_SECONDS", 1.0)
    attempts, tries = gcs_requests.Attempts(PATH), []

    def send(pieces: int) -> None:
        tries.append(pieces)
        for _ in range(pieces):
            time.sleep(0.2)
            attempts.record_sent()
        raise ConnectionResetError("reset by peer")

    with pytest.raises(StoreUnavailableError, match="reset by peer"):
        gcs_requests.persist(PATH, lambda: send(10), attempts)
    assert len(tries) >= 2
    tries.clear()
    attempts.record_progress()
    begun = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        gcs_requests.persist(PATH, lambda: send(0), attempts)
    assert time.monotonic() - begun < 5


@pytest.mark.slow
def test_a_slow_network_takes_an_upload_whose_megabytes_last_longer_than_a_request_may_stand_still(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_transfers, "TIMEOUT", (0.6, 20.0))
    gcs.faults.add(Fault("slow_upload", method="POST", bytes_per_second=8e5, count=None))
    data = content(8 << 20)  # more than the buffers of the kernel take
    files.write_new(PATH, [data])
    assert files.read(PATH) == data.tobytes()


def test_an_outage_has_an_exit_status_of_its_own_and_a_refusal_is_the_users(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting draws nothing from the process's generator, of which Keras's layers draw the seeds of their weights."""
    monkeypatch.setattr(gcs_requests, "_BUSY_PATIENCE_SECONDS", 1.0)
    gcs.faults.add(Fault("status", status=503, count=None))
    before = random.getstate()
    with pytest.raises(StoreUnavailableError, match="503") as raised:
        files.read(PATH)
    assert raised.value.filename == PATH and len(gcs.asked) >= 3 and random.getstate() == before
    for status, ends_with in ((503, EXIT_STORE_UNAVAILABLE), (403, EXIT_USER_ERROR)):
        gcs.faults.clear()
        gcs.faults.add(Fault("status", status=status, count=None))
        assert exit_status_of(lambda: check_writable("gs://bucket/run")) == ends_with
        assert exit_status_of(lambda: files.list_names("gs://bucket/run"), trusts_the_disk=False) == ends_with


def test_data_of_a_bucket_that_does_not_answer_end_with_the_status_of_an_outage(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_requests, "_BUSY_PATIENCE_SECONDS", 1.0)
    gcs.faults.add(Fault("status", status=503, count=None))
    for read in (lambda: files.read(PATH), lambda: input_files.find_files("gs://bucket/train-*", "files")):
        with pytest.raises((OSError, UserError)):
            failures.record_errors(read)()
        told = failures.pop_error()
        assert isinstance(told, UserError) and "503" in str(told)
        with pytest.raises(UserError) as raised:
            raise told from RuntimeError("TensorFlow's")
        assert exit_status_of_error(raised.value) == EXIT_STORE_UNAVAILABLE


def test_a_refusal_is_told_with_the_cure(gcs: GcsServer) -> None:
    for status, advice in ((403, "Storage Object Admin"), (401, "gcloud auth application-default login")):
        gcs.faults.add(Fault("status", status=status, count=None))
        with pytest.raises(PermissionError):
            files.write_new(PATH, [b""])
        with pytest.raises(UserError, match=advice):
            check_writable("gs://bucket/run")
        gcs.faults.clear()
    with pytest.raises(UserError, match="Create the bucket"):
        check_writable("gs://missing/run")
    with pytest.raises(FileNotFoundError):
        files.read("gs://missing/run")
    check_writable("gs://bucket/run")
    assert gcs.buckets.names("bucket") == []


TIMED = """
import sys, time
from tfdist.storage import files, gcs_requests
gcs_requests.client()
start = time.monotonic()
for call in (lambda: files.exists("gs://b/x"), lambda: files.write_new("gs://b/x", [b"1"])):
    try:
        call()
    except OSError as error:
        print(type(error).__name__, error.filename, round(time.monotonic() - start, 1), error.strerror)
    start = time.monotonic()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("is_listening", "most_seconds"), [(False, PATIENCE * 5), (True, 60)])  # 5 and 20 are promised
def test_a_server_that_refuses_or_never_answers_fails_in_time(is_listening: bool, most_seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if not is_listening:
            silent.close()
        done = run_python(["-c", TIMED], env={"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}).check()
    found = re.findall(r"StoreUnavailableError gs://b/x (\S+)", done.stdout)
    assert len(found) == 2
    assert all(float(seconds) <= most_seconds for seconds in found)
    assert is_listening or f"127.0.0.1:{port}: [Errno 111] Connection refused" in done.stdout


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    gcs_requests.forget_client()
    with pytest.raises(UserError, match=r"(?s)google-cloud-storage.*tfdist\[gcs\]"):
        files.exists("gs://b/x")
