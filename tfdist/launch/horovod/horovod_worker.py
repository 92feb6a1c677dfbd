"""Runs one worker under horovodrun and leaves its exit status where the launcher finds it.

`python -m tfdist.launch.horovod.horovod_worker DIRECTORY CPUS_OF_EACH_RANK VARIABLES_OF_EACH_RANK COMMAND…` with
HOROVOD_RANK set; started by horovodrun as `horovod.py` asks it to.

Invariant: for rank R, DIRECTORY/R.pid names the worker's process group while it runs, DIRECTORY/R.status its status
once it has ended, each written whole or not at all. This program itself ends with 0 whatever the worker's status: else
horovodrun would end the other ranks on its own account (SIGKILL after five seconds) and report 1.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tfdist.launch.processes import bound_to_parent, has_ended, send_to_group, shell_status
from tfdist.telemetry.heartbeat import VARIABLE as HEARTBEAT_VARIABLE


def main(directory: Path, cpus_of_ranks: str, variables_of_ranks: str, command: list[str]) -> None:
    """Runs the command as the worker of this rank, with its processors and variables; ends as it ends."""
    rank = int(os.environ["HOROVOD_RANK"])
    cpus = [int(cpu) for cpu in cpus_of_ranks.split(":")[rank].split(",") if cpu]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # horovodrun.py had it ignored, and the worker would inherit that
    own = {**json.loads(variables_of_ranks)[rank], HEARTBEAT_VARIABLE: str(directory / f"{rank}.heartbeat")}
    started = bound_to_parent(command, cpus)
    environment = {**os.environ, **own}
    with subprocess.Popen(started, env=environment, stdin=subprocess.DEVNULL, start_new_session=True) as worker:
        # horovodrun's own way of ending a rank, for when the launcher is gone.
        signal.signal(signal.SIGTERM, lambda *_: None if has_ended(worker.pid) else worker.terminate())
        write_whole(directory / f"{rank}.pid", worker.pid)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        send_to_group(worker.pid, signal.SIGKILL)
        write_whole(directory / f"{rank}.status", shell_status(worker.wait()))


def write_whole(path: Path, number: int) -> None:
    """Writes a number such that a reader finds all of it or no file."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(str(number))
    part.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
