"""A `WorkerHost` that is asked by lines of JSON: `python -m tfdist.launch.remote_worker`, started by `hosts.py`.

A request is `{"name": METHOD, "arguments": […]}` on stdin. Each but `send` is answered by a line on stdout,
`{"value": …}`, in the order of the requests. At the end of stdin the launcher is gone.

Invariant: the worker does not outlive this process, nor this process the launcher's end of the connection.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from typing import Any

from tfdist.errors import TfdistError
from tfdist.launch.worker_host import Seen, WorkerHost


def main() -> None:
    """Answers until the launcher closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the launcher says when the worker ends, which would inherit SIG_IGN
    host = WorkerHost(None)
    for line in sys.stdin:
        request = json.loads(line)
        name, arguments = request["name"], request["arguments"]
        if name == "send":
            host.send(*arguments)
            continue
        try:
            answer = {"value": _call(host, name, arguments)}
        except (OSError, TfdistError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    host.send(signal.SIGKILL)


def _call(host: WorkerHost, name: str, arguments: list[Any]) -> Any:
    if name == "meet":
        return host.meet(*arguments)
    if name == "start":
        index, variables, *rest = arguments
        os.environ.update(variables)
        return host.start(index, *rest)
    return encode_seen(host.look(*arguments))


def encode_seen(seen: Seen) -> list[Any]:
    """A `Seen` as JSON carries it."""
    written = [[stream, base64.b64encode(data).decode()] for stream, data in seen.written]
    shown = {name: base64.b64encode(data).decode() for name, data in seen.shown.items()}
    return [seen.status, seen.pid, seen.state, written, shown, seen.now]


def decode_seen(value: list[Any]) -> Seen:
    """The `Seen` that `encode_seen` made `value` of."""
    status, pid, state, written, shown, now = value
    return Seen(
        status,
        pid,
        state,
        [(stream, base64.b64decode(data)) for stream, data in written],
        {name: base64.b64decode(data) for name, data in shown.items()},
        now,
    )


if __name__ == "__main__":
    main()
