"""The tests' Cloud Storage in a process of its own, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BUCKET = "bench"
TESTS = Path(__file__).resolve().parents[1] / "tests"


@contextlib.contextmanager
def emulator(*faults: dict[str, object]) -> Iterator[None]:
    """The store, used from here on, with `faults` (tests/gcs/faults.py)."""
    command = [sys.executable, __file__, json.dumps(faults)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        os.environ["STORAGE_EMULATOR_HOST"] = server.stdout.readline().strip()
        yield
    finally:
        server.kill()
        server.communicate()


def main(faults: str) -> None:
    """Prints the store's address, and ends with standard input."""
    sys.path.insert(0, str(TESTS))
    from gcs.faults import Fault
    from gcs.server import GcsServer

    with GcsServer(BUCKET) as server:
        server.faults.add(*(Fault(**fault) for fault in json.loads(faults)))
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
