"""Becomes horovodrun, deaf to SIGTERM: `python -m tfdist.launch.horovod.horovodrun SCRIPT ARGUMENTS…`.

Invariant: horovodrun does not end its ranks because of a signal. Where the whole job is told to leave, as Slurm and a
shell's `kill` of a group do, it would kill them five seconds later, while they save. Started by `horovod.py`, which
signals the workers itself.
"""

from __future__ import annotations

import runpy
import signal
import sys
from typing import Any


def main(script: str, arguments: list[str]) -> None:
    """Runs horovodrun's script, with SIGTERM ignored by it and by what it starts."""
    set_handler = signal.signal
    set_handler(signal.SIGTERM, signal.SIG_IGN)  # which its processes inherit; horovod_worker.py undoes it

    def set_another_handler(number: int, handler: Any) -> Any:
        return signal.SIG_IGN if number == signal.SIGTERM else set_handler(number, handler)

    signal.signal = set_another_handler
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
