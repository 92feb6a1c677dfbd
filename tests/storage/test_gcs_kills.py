"""A process that is killed at any request of an upload to gs:// leaves the object whole or no object."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from gcs.faults import Fault
from gcs.server import GcsServer
from support import clean_environment

from tfdist.storage import files

pytestmark = pytest.mark.slow

OBJECTS = "/b/bucket/o"  # the library also asks for the bucket, on a thread of its own, for traces
NUM_BYTES = 5 << 19
# Three parts, composing, looking at the result, removing the parts.
NUM_REQUESTS = 3 + 1 + 1 + 3
WRITE = """
from tfdist.storage import files, gcs_transfers
gcs_transfers.PART_BYTES = 1 << 20
files.write_new("gs://bucket/run/large", [b"x" * (5 << 19)])
"""


def test_an_upload_in_parts_takes_so_many_requests(gcs: GcsServer) -> None:
    subprocess.run([sys.executable, "-c", WRITE], env=clean_environment(), check=True, timeout=60)
    assert len([asked for asked in gcs.asked if OBJECTS in asked.target]) == NUM_REQUESTS
    assert gcs.buckets.names("bucket") == ["run/large"]


@pytest.mark.parametrize("moment", ["stall_upload", "stall_download"])  # before the server acts, and after it
def test_a_kill_at_any_request_leaves_the_object_whole_or_none(gcs: GcsServer, moment: str) -> None:
    found = []
    for request in range(NUM_REQUESTS):
        gcs.faults.clear()
        gcs.faults.add(Fault(moment, path=OBJECTS, skip=request))
        before = len([asked for asked in gcs.asked if asked.fault])
        with subprocess.Popen([sys.executable, "-c", WRITE], env=clean_environment()) as writer:
            while len([asked for asked in gcs.asked if asked.fault]) == before and writer.poll() is None:
                time.sleep(0.005)
            writer.kill()
        gcs.faults.clear()
        names = files.list_tree("gs://bucket/run")
        assert names in ([], ["large"])
        assert not names or files.read("gs://bucket/run/large") == b"x" * NUM_BYTES
        found.append(len(names))
        files.remove_tree("gs://bucket/run")
        assert gcs.buckets.names("bucket") == []  # no part is left behind either
    assert found == sorted(found)
    assert found.count(0) == (4 if moment == "stall_upload" else 3)
