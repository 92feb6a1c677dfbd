"""TensorBoard itself, asked over HTTP for what it shows of a directory."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from processes import serving
from support import free_ports


class TensorBoard:
    """A server that runs."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, plugin: str, request: dict[str, Any] | None = None) -> Any:
        """What `/data/plugin/…` answers, to a GET or, with a request, to a POST."""
        body = None if request is None else json.dumps(request).encode()
        headers = {"Content-Type": "application/json", "X-XSRF-Protected": "1"}
        asked = urllib.request.Request(f"{self._address}/data/plugin/{plugin}", body, headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.loads(answer.read())

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.ask("scalars/tags"))
        return False


@contextlib.contextmanager
def tensorboard(directory: pathlib.Path) -> Iterator[TensorBoard]:
    """A server of what a directory holds, once it has read that."""
    (port,) = free_ports(1)
    log = directory.parent / f"{directory.name}-tensorboard.log"
    command = ["-m", "tensorboard.main", f"--logdir={directory}", f"--port={port}", "--load_fast=false"]
    server = TensorBoard(f"http://127.0.0.1:{port}")
    with serving([sys.executable, *command], log, server.is_up):
        yield server
