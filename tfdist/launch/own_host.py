"""The cluster of a list of hosts, as TF_CONFIG for the one among them that this machine is.

Invariant: every host that reads the same list makes the same cluster.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import psutil

from tfdist.errors import UserError
from tfdist.launch.local_workers import tf_config

PORT = 2222


def make_tf_config(text: str) -> str:
    """TF_CONFIG of this machine's worker, in a cluster of one worker a host.

    Args:
      text: HOST[:PORT] separated by commas, or the name of a file with one a line.

    Raises:
      UserError: the list is wrong, does not name this machine once, or this machine's port is taken.
    """
    addresses = read_addresses(text)
    own = get_own_addresses()
    resolved = [_resolve(address, own) for address in addresses]
    here = [index for index, each in enumerate(resolved) if each & own]
    if not here:
        raise UserError(
            f"None of the hosts {', '.join(addresses)} is this machine, whose addresses are {', '.join(sorted(own))}. "
            "Write in --hosts the name or address by which the others reach it."
        )
    if len(here) > 1:
        names = " and ".join(addresses[index] for index in here)
        raise UserError(
            f"In --hosts {names} are both this machine. Write each machine once; for several workers on one machine "
            "write --workers=N in place of --hosts."
        )
    _check_port(addresses[here[0]])
    return tf_config(addresses, here[0])


def read_addresses(text: str) -> list[str]:
    """HOST:PORT of each host in the list; raises UserError."""
    with contextlib.suppress(OSError, ValueError):  # it is no file
        text = ",".join(line.partition("#")[0] for line in Path(text).read_text().splitlines())
    addresses = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = part.rpartition(":") if part.count(":") == 1 or "]" in part else (part, "", "")
        if not colon or part.endswith("]"):
            host, port = part, str(PORT)
        if not host or " " in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--hosts takes HOST or HOST:PORT, separated by commas, or a file; received {part!r}.")
        addresses.append(f"{host}:{port}")
    if len(set(addresses)) < len(addresses):
        twice = next(each for each in addresses if addresses.count(each) > 1)
        raise UserError(f"--hosts names {twice} twice. Write each host once.")
    if len(addresses) < 2:
        raise UserError(f"--hosts={text} names {len(addresses)} hosts. Write all of them: --hosts=a,b")
    return addresses


def get_own_addresses() -> set[str]:
    """The addresses of this machine's network interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    each = [address for interface in psutil.net_if_addrs().values() for address in interface]
    return {address.address.partition("%")[0] for address in each if address.family in families}


def _resolve(address: str, own: set[str]) -> set[str]:
    host = address.rpartition(":")[0].strip("[]")
    if host == os.uname().nodename:  # which may stand for an address of loopback alone
        return own
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise UserError(
            f"The host {host!r} of --hosts has no address: {error}. Check its name, or write the address."
        ) from None


def _check_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", int(port)))
        except OSError as error:
            raise UserError(
                f"Port {port} of this machine cannot be used: {error.strerror}. End the program that has it, or write "
                f"another in --hosts on every host: {host}:PORT"
            ) from None
