"""Asks the metadata server of Google Compute Engine and Cloud TPU whether this VM is about to end.

Invariant: only what ends the VM counts (a preemption, maintenance that terminates), not a live migration; where there
is no such server nothing is asked. See
https://cloud.google.com/compute/docs/metadata/querying-metadata.
"""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import threading
from collections.abc import Callable

DEFAULT_ADDRESS = "metadata.google.internal"
PRODUCT_NAME_FILE = pathlib.Path("/sys/class/dmi/id/product_name")
# What each key says when this VM is about to end.
ENDING_VALUES = {
    "preempted": {"TRUE": "this VM is being preempted"},
    "maintenance-event": {"TERMINATE_ON_HOST_MAINTENANCE": "this VM will be terminated for maintenance of its host"},
}
POLL_SECONDS = 2.0  # a preempted VM has 30 seconds
ANSWER_SECONDS = 10


def find_address(given: str | None = None, *, product_name_file: pathlib.Path = PRODUCT_NAME_FILE) -> str | None:
    """The server's `host` or `host:port`: the one given, or the usual one on a machine of Google's, or None."""
    if given:
        return given
    try:
        product = product_name_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return DEFAULT_ADDRESS if product.strip().startswith("Google") else None


def watch(address: str, closing: threading.Event, on_notice: Callable[[str], None]) -> None:
    """Asks again and again, until `closing` is set or the VM is about to end; a server that fails is asked on.

    Args:
      address: `host` or `host:port` of the server; proxies are not used, as Google's documentation asks.
      closing: ends it, after the request that it is in.
      on_notice: called at most once, with a clause such as "this VM is being preempted".
    """
    while not closing.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):
            reasons = [ENDING_VALUES[key].get(_ask(address, key)) for key in ENDING_VALUES]
            if (reason := next(filter(None, reasons), None)) is not None:
                if not closing.is_set():
                    on_notice(reason)
                return
        closing.wait(POLL_SECONDS)


def _ask(address: str, key: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)
    path = f"/computeMetadata/v1/instance/{key}"
    try:
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace").strip()
    finally:
        connection.close()
    if answer.status != http.client.OK or answer.headers.get("Metadata-Flavor") != "Google":
        raise http.client.HTTPException(f"it answered {answer.status} {answer.reason} to GET {path}")
    return text
