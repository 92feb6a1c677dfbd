"""What chief and workers of a sweep say to each other: JSON objects over one gRPC stream a worker.

Invariant: every message is an object with `kind`, one of the names below, which say who sends it and when. Nothing else
of the transport is known to `remote_places.py` (the chief's side) and `remote_worker.py` (the worker's).

From a worker:
  hello: first; `version`, `worker` (its own for as long as the process lives), `name`, `places`, `identity` (of the
    sweep), `held`: the leases that it has, each with `lease`, `key` and `parameters`.
  ready: after a welcome, that it shares the run directory; before it gets no trial.
  renew: that it is there; `number`.
  ended: a trial's process has ended; `lease`, `status`, `log` (its last words), `seconds`. Repeated after each hello
    until it is noted.
  leaving: it takes no more trials.

From the chief:
  welcome: to hello; `lease_seconds`, `mark` (the content of the directory's mark), `kept` (those leases that hold).
  refused: to hello; `message`.
  renewed: `number`.
  start: `lease`, `key` (of the directory below trials/), `parameters` (gin statements).
  stop: let it save and leave; `lease`.
  drop: the lease does not hold, whatever becomes of the process does not count; `lease`.
  noted: the end is in the journal; `lease`.
  over: the sweep has ended; `status`, `message`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdist.telemetry.json_text import to_json

METHOD = "/tfdist.Sweep/Join"
VERSION = 1
HELLO, READY, RENEW, ENDED, LEAVING = "hello", "ready", "renew", "ended", "leaving"
WELCOME, REFUSED, RENEWED, START = "welcome", "refused", "renewed", "start"
STOP, DROP, NOTED, OVER = "stop", "drop", "noted", "over"


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    return to_json(message).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no message."""
    message = json.loads(data)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("no message of a sweep")
    return message
