"""Whether the place of a run can be written, read and deleted from, and how quickly."""

from __future__ import annotations

import itertools
import os
import time
import uuid

from tfdist.doctor.findings import PROBLEM, Finding, fine
from tfdist.errors import TfdistError, UserError
from tfdist.storage import files, troubles

GROUP = "storage"
MEBIBYTES = 4


def check_storage(path: str) -> Finding:
    """Writes, reads and deletes some megabytes below `path`; leaves nothing."""
    name = files.join(path, f".doctor-{uuid.uuid4().hex[:12]}")
    data = os.urandom(MEBIBYTES << 20)
    try:
        troubles.check_writable(path)
        try:
            moments = [time.perf_counter()]
            files.write_new(name, [memoryview(data)])
            moments.append(time.perf_counter())
            is_same = files.read(name) == data
            moments.append(time.perf_counter())
        finally:
            files.remove(name)
        moments.append(time.perf_counter())
        problem = "" if is_same else "gave back other bytes"
        problem = "keeps a deleted file" if files.exists(name) else problem
    except UserError as error:
        return _failed(path, str(error))
    except (OSError, TfdistError) as error:
        problem = " ".join(str(error).split())
    if problem:
        return _failed(path, f"{path!r}: {problem}")
    write, read, delete = (after - before for before, after in itertools.pairwise(moments))
    rates = f"written at {MEBIBYTES / write:,.0f} MiB/s, read at {MEBIBYTES / read:,.0f} MiB/s"
    seconds = {"write": write, "read": read, "delete": delete}
    return fine(GROUP, f"{path}: {rates}, deleted in {delete * 1e3:.0f} ms", path=path, seconds=seconds)


def _failed(path: str, what: str) -> Finding:
    why = "Checkpoints, logs and the result of a run are written there; a run checks it too and ends before it trains."
    hint = "Mend what the message names, or give another --run_dir."
    return Finding(PROBLEM, GROUP, what, why, hint, {"path": path})
