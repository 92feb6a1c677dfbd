"""What chief and workers of a sweep say to each other: JSON objects over one gRPC stream a worker.

Invariant: every message is an object with `kind`, one of the names below, which say who sends it and when, and with the
fields of that kind, each of its type and bounded; `decode` refuses all else. Nothing else of the transport is known to
`remote_places.py` (the chief's side) and `remote_worker.py` (the worker's).

First, so that each side knows that the other has the sweep's secret (`handshake.py`):
  knock: from the worker; `version`, `nonce`.
  challenge: from the chief; `nonce`, `proof`.
  proof: from the worker; `proof`.

From a worker:
  hello: `worker` (its own for as long as the process lives), `name`, `places`, `identity` (of the sweep), `held`: the
    leases that it has, each with `lease`, `key` and the settings as in start.
  ready: after a welcome, that it shares the run directory; before it gets no trial.
  renew: that it is there; `number`.
  ended: a trial's process has ended; `lease`, `status`, `log` (its last words), `seconds`. Repeated after each hello
    until it is noted.
  leaving: it takes no more trials.

From the chief:
  welcome: to hello; `lease_seconds`, `mark` (the content of the directory's mark), `kept` (those leases that hold).
  refused: to knock, proof or hello, and to what is no message; `message`.
  renewed: `number`.
  start: `lease`, `key` (of the directory below trials/), `values`, `seed`, `stop_after_epochs` (`trial_settings.py`).
  stop: let it save and leave; `lease`.
  drop: the lease does not hold, whatever becomes of the process does not count; `lease`.
  noted: the end is in the journal; `lease`.
  over: the sweep has ended; `status`, `message`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import is_whole_number
from tfdist.telemetry.json_text import from_json, to_json

METHOD = "/tfdist.Sweep/Join"
VERSION = 2
MOST_BYTES = 1 << 20  # of a message
KNOCK, CHALLENGE, PROOF = "knock", "challenge", "proof"
HELLO, READY, RENEW, ENDED, LEAVING = "hello", "ready", "renew", "ended", "leaving"
WELCOME, REFUSED, RENEWED, START = "welcome", "refused", "renewed", "start"
STOP, DROP, NOTED, OVER = "stop", "drop", "noted", "over"

MOST_PLACES = 4096
OTHER_SECRET = (
    "The chief of the sweep and this worker do not have the same secret. Give all of them the same TFDIST_SWEEP_SECRET "
    "or TFDIST_SWEEP_SECRET_FILE, or none where all are on one machine."
)
_MOST_NUMBER = 2**53
_MOST_NAME = 300  # characters
_KEY = re.compile(r"[0-9]{4,9}(-seed-[0-9]{1,9})?")  # a trial's name, and which of its seeds
_ID = re.compile(r"[0-9a-f]{32}")
_HASH = re.compile(r"[0-9a-f]{64}")


class NoMessage(ValueError):
    """What came is no message of this protocol."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    return to_json(message).encode()


def decode(data: bytes, *kinds: str) -> dict[str, Any]:
    """A message, whole and sound; with `kinds` one of those. Raises NoMessage for anything else."""
    if len(data) > MOST_BYTES:
        raise NoMessage(f"it has {len(data):,} bytes, more than {MOST_BYTES:,}")
    try:
        message = from_json(data)
    except ValueError as error:
        raise NoMessage("it is not JSON") from error
    kind = message.get("kind") if isinstance(message, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS or kind not in (kinds or _FIELDS):
        raise NoMessage(f"it is no {' or '.join(kinds) or 'message of a sweep'}")
    _check(kind, _FIELDS[kind], message)
    return message


def _check(what: str, fields: Mapping[str, Callable[[Any], bool]], message: Mapping[str, Any]) -> None:
    for name, is_right in fields.items():
        if name not in message or not is_right(message[name]):
            raise NoMessage(f"{what}: {name} is missing, or not what it has to be")


def _is_number(value: Any) -> bool:
    return is_whole_number(value, least=0) and value <= _MOST_NUMBER


def _is_status(value: Any) -> bool:
    return is_whole_number(value, least=-255) and value <= 255


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_NAME and value.isprintable()


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_lease(value: Any) -> bool:
    try:
        _check("lease", _LEASE, value)
    except (NoMessage, TypeError):
        return False
    return True


_SETTINGS = {
    "values": _is(dict),
    "seed": lambda value: is_whole_number(value, least=-_MOST_NUMBER) and value <= _MOST_NUMBER,
    "stop_after_epochs": lambda value: value is None or (_is_number(value) and value > 0),
}
_LEASE = {"lease": _matches(_ID), "key": _matches(_KEY), **_SETTINGS}
_OF_LEASE = {"lease": _matches(_ID)}
_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    KNOCK: {"version": _is_number, "nonce": _matches(_HASH)},
    CHALLENGE: {"nonce": _matches(_HASH), "proof": _matches(_HASH)},
    PROOF: {"proof": _matches(_HASH)},
    HELLO: {
        "worker": _matches(_ID),
        "name": _is_name,
        "places": lambda value: is_whole_number(value, least=1) and value <= MOST_PLACES,
        "identity": _is(dict),
        "held": lambda value: isinstance(value, list) and len(value) <= MOST_PLACES and all(map(_is_lease, value)),
    },
    READY: {},
    RENEW: {"number": _is_number},
    ENDED: {**_OF_LEASE, "status": _is_status, "log": _is(str), "seconds": _is_seconds},
    LEAVING: {},
    WELCOME: {
        "lease_seconds": lambda value: _is_seconds(value) and value > 0,
        "mark": _matches(_ID),
        "kept": lambda value: isinstance(value, list) and all(map(_matches(_ID), value)),
    },
    REFUSED: {"message": _is(str)},
    RENEWED: {"number": _is_number},
    START: _LEASE,
    STOP: _OF_LEASE,
    DROP: _OF_LEASE,
    NOTED: _OF_LEASE,
    OVER: {"status": _is_status, "message": _is(str)},
}
