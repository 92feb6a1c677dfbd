"""A program that prints what a process can see of itself, and exits with 7; run by test_forks.py."""

import json
import os
import signal
import sys
from pathlib import Path

shown = Path(f"/proc/{os.getpid()}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
environ = Path(f"/proc/{os.getpid()}/environ").read_bytes().split(b"\0")
print(
    json.dumps(
        {
            "argv": sys.argv,
            "command": [part.decode() for part in shown],
            "environment": sorted(os.environ.items()),
            "mark": [line.decode() for line in environ if line.startswith(b"TFDIST_TEST_MARK=")],
            "path": [part for part in sys.path if part],
            "directory": os.getcwd(),
            "parent": os.getppid(),
            "leads": os.getsid(0) == os.getpid(),
            "name": __name__,
            "files": sorted(os.listdir("/proc/self/fd"), key=int)[:3],
            "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        }
    )
)
print("to stderr", file=sys.stderr)
sys.exit(7)
