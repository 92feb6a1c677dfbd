"""The tests' Cloud Storage, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator

from measuring import HERE

BUCKET = "bench"


@contextlib.contextmanager
def emulator(*faults: dict[str, object]) -> Iterator[Callable[[], int]]:
    """The store, used from here on, with `faults` (tests/gcs/faults.py); counts the requests that it has had."""
    command = [sys.executable, str(HERE.parent / "tests/gcs/server.py"), f"--bucket={BUCKET}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        name, _, address = server.stdout.readline().strip().partition("=")
        os.environ[name] = address
        if faults:
            urllib.request.urlopen(f"{address}/_faults", json.dumps(faults).encode()).close()

        def count() -> int:
            with urllib.request.urlopen(f"{address}/_requests") as answer:
                return len(json.load(answer)["requests"])

        yield count
    finally:
        server.kill()
        server.communicate()
