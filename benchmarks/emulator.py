"""The tests' Cloud Storage in a process of its own, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

BUCKET = "bench"
TESTS = Path(__file__).resolve().parents[1] / "tests"


@contextlib.contextmanager
def emulator(*faults: dict[str, object]) -> Iterator[Callable[[], int]]:
    """The store, used from here on, with `faults` (tests/gcs/faults.py); counts the requests that it has had."""
    command = [sys.executable, __file__, json.dumps(faults)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdin and server.stdout
        os.environ["STORAGE_EMULATOR_HOST"] = server.stdout.readline().strip()
        yield lambda: int(_ask(server))
    finally:
        server.kill()
        server.communicate()


def _ask(server: subprocess.Popen[str]) -> str:
    assert server.stdin and server.stdout
    server.stdin.write("count\n")
    server.stdin.flush()
    return server.stdout.readline()


def main(faults: str) -> None:
    """Prints the store's address, and for each line that it reads how many requests there were."""
    sys.path.insert(0, str(TESTS))
    from gcs.faults import Fault
    from gcs.server import GcsServer

    with GcsServer(BUCKET) as server:
        server.faults.add(*(Fault(**fault) for fault in json.loads(faults)))
        print(server.address, flush=True)
        for _ in sys.stdin:
            print(len(server.asked), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
