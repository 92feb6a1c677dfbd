"""What workers say to each other in a rendezvous: one JSON line each way over TCP, and what else may answer there.

Invariant: `decode` returns only what a worker of this protocol said of itself; all else is an exception that
`describe` puts in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import json
import socket
from collections.abc import Sequence
from typing import Any

from tfdist.errors import is_whole_number
from tfdist.telemetry.json_text import from_json

PROTOCOL = "tfdist-rendezvous-1"
MAX_LINE_BYTES = 1 << 20
MOST_WORKERS = 1 << 20
MOST_LISTED = 64
MOST_NAMED = 8
BACKLOG = 4096  # as many peers may ask in one instant; the system has a limit of its own
FOREIGN_PATIENCE_SECONDS = 5.0  # for a foreign program at a peer's address to go away
_AND_OTHERS = "… and "  # begins no address


class WrongPeer(Exception):
    """Something answered that is not a worker in this protocol."""


def encode(**said: object) -> bytes:
    """A line that says who this worker is."""
    return json.dumps({"protocol": PROTOCOL, **said}).encode() + b"\n"


@functools.lru_cache(maxsize=8)
def listed(workers: tuple[str, ...]) -> list[str]:
    """The addresses of a cluster as workers tell them to each other: all, or of a large one the first and a digest.

    Every worker tells them to every other, which would otherwise take time that grows with the cube of their number.
    """
    if len(workers) <= MOST_LISTED:
        return list(workers)
    digest = hashlib.sha256("\0".join(workers).encode()).hexdigest()[:12]
    return [workers[0], f"{_AND_OTHERS}{len(workers) - 1:,} others (digest {digest})"]


def decode(line: bytes) -> dict[str, Any]:
    """A peer's account of itself.

    Raises:
      ConnectionResetError: it closed without a word.
      WrongPeer: this is no worker in a rendezvous.
    """
    if not line:
        raise ConnectionResetError
    try:
        said = from_json(line)
        is_ours = said["protocol"] == PROTOCOL and is_index(said["index"]) and is_texts(said["workers"])
        is_ours = is_ours and isinstance(said["waits_for"], list) and all(map(is_index, said["waits_for"]))
        if is_ours and not any(text.startswith(_AND_OTHERS) for text in said["workers"][-1:]):
            is_ours = all(index < len(said["workers"]) for index in [said["index"], *said["waits_for"]])
        is_ours = is_ours and isinstance(said["ready"], bool) and isinstance(said["start"], str)
    except (ValueError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise WrongPeer(line)
    return said


def is_index(value: object) -> bool:
    """Whether it can be a worker's number."""
    return is_whole_number(value, least=0) and value < MOST_WORKERS


def is_texts(value: object) -> bool:
    """Whether it is a list of texts that can be shown, such as the addresses of a cluster."""
    return isinstance(value, list) and all(isinstance(each, str) and each.isprintable() for each in value)


def describe(error: Exception, host: str, name_patience_seconds: float) -> tuple[str, float | None]:
    """What keeps a peer from answering, and for how long to bear with it; None bears with it to the end."""
    match error:
        case WrongPeer(args=[bytes(line)]) if line[3:4] == b"\x04":  # HTTP/2's first frame, so gRPC
            return "TensorFlow runs there already: is it a worker of an earlier start that must end first?", None
        case WrongPeer(args=[line]):
            return f"something else than a tfdist worker answers there: {line[:60]!r}", FOREIGN_PATIENCE_SECONDS
        case socket.gaierror():
            return f"the host name {host!r} does not resolve", name_patience_seconds
        case ConnectionRefusedError():
            return "nothing listens there yet", None
        case ConnectionResetError():
            return "it accepts connections and closes them without an answer", None
        case TimeoutError():
            return "it does not answer; it hangs, its host is off, or a firewall is between", None
    return (error.strerror if isinstance(error, OSError) and error.strerror else repr(error)), None


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first address of `host` that takes one; raises what the last address answered."""
    loop = asyncio.get_running_loop()
    refused: OSError = ConnectionRefusedError()
    for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            reader, writer = await asyncio.open_connection(str(address[0]), port, limit=MAX_LINE_BYTES)
        except OSError as error:
            refused = error
            continue
        if writer.get_extra_info("sockname") != writer.get_extra_info("peername"):
            return reader, writer
        writer.close()  # TCP met itself, which it can where nobody listens
    raise refused


def listen(host: str | None, port: int) -> list[socket.socket]:
    """Sockets listening on `port` at every address of `host` that this machine has; None means all interfaces.

    SO_REUSEADDR leaves the port free for TensorFlow as soon as they are closed.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening: list[socket.socket] = []
    absent = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    with contextlib.ExitStack() as close_on_error:
        for family, kind, protocol, _, address in infos:
            try:
                sock = close_on_error.enter_context(socket.socket(family, kind, protocol))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
                sock.listen(BACKLOG)
                listening.append(sock)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # as where IPv6 is off
                    raise
                absent = error
        if not listening:
            raise absent
        close_on_error.pop_all()
    return listening


async def end(tasks: Sequence[asyncio.Task[None]], servers: Sequence[asyncio.Server]) -> None:
    """Ends what a meeting has begun."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in servers:
        server.close()
