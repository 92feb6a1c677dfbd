"""A process that is killed while it uploads to gs:// leaves the object whole or no object."""

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
