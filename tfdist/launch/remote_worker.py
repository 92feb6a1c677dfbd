"""A `WorkerHost` that is asked by lines of JSON: `python -m tfdist.launch.remote_worker`, started by `hosts.py`.

A request is `{"name": METHOD, "arguments": […]}` on stdin. Each but `send` is answered by a line on stdout,
`{"value": …}`, in the order of the requests. At the end of stdin the launcher is gone.

Invariant: the worker does not outlive this process, nor this process the launcher's end of the connection.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys

from tfdist.errors import TfdistError
from tfdist.launch.worker_host import Seen, WorkerHost


def main() -> None:
    """Answers until the launcher closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the launcher says when the worker ends, which would inherit SIG_IGN
    host = WorkerHost(None)
    for line in sys.stdin:
        request = json.loads(line)
        if request["name"] == "send":
            host.send(*request["arguments"])
            continue
        try:
            value = getattr(host, request["name"])(*request["arguments"])
            answer = {"value": dataclasses.asdict(value) if isinstance(value, Seen) else value}
        except (OSError, TfdistError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    host.send(signal.SIGKILL)


if __name__ == "__main__":
    main()
