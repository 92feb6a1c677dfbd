"""Whether the place of a run can be written, read and deleted from, and how quickly."""

from __future__ import annotations

import os
import time
import uuid

from tfdist.doctor.findings import PROBLEM, Finding, fine
from tfdist.errors import TfdistError, UserError
from tfdist.storage import files, troubles

GROUP = "storage"
PROBE_BYTES = 4 << 20


def check_storage(path: str) -> Finding:
    """Writes, reads and deletes some megabytes below `path`; leaves nothing."""
    name = files.join(path, f".doctor-{uuid.uuid4().hex[:12]}") if path else ""
    data = os.urandom(PROBE_BYTES)
    seconds: dict[str, float] = {}
    try:
        troubles.check_writable(path)
        try:
            began = time.perf_counter()
            files.write_new(name, [memoryview(data)])
            seconds["write"] = time.perf_counter() - began
            began = time.perf_counter()
            same = files.read(name) == data
            seconds["read"] = time.perf_counter() - began
        finally:
            began = time.perf_counter()
            files.remove(name)
            seconds["delete"] = time.perf_counter() - began
        left = files.exists(name)
    except UserError as error:
        return _failed(path, str(error))
    except (OSError, TfdistError) as error:
        return _failed(path, f"{path!r}: {' '.join(str(error).split())}")
    if not same or left:
        return _failed(path, f"{path!r} gave back other bytes" if not same else f"{path!r} keeps a deleted file")
    rates = ", ".join(
        f"{word} {PROBE_BYTES / 2**20 / max(seconds[step], 1e-9):,.0f} MiB/s"
        for word, step in (("written at", "write"), ("read at", "read"))
    )
    return fine(GROUP, f"{path}: {rates}, deleted in {seconds['delete'] * 1e3:.0f} ms", path=path, seconds=seconds)


def _failed(path: str, what: str) -> Finding:
    why = "Checkpoints, logs and the result of a run are written there; a run checks it too and ends before it trains."
    hint = "Mend what the message names, or give another --run_dir."
    return Finding(PROBLEM, GROUP, what, why, hint, {"path": path})
