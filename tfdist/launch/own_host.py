"""The cluster of a list of hosts, and which of them this machine is.

Invariant: every host that reads the same list makes the same cluster.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from tfdist.errors import UserError
from tfdist.strategies.cluster import tf_config

PORT = 2222
LOOPBACK = ("localhost", "127.0.0.1")


def find_own_host(text: str) -> tuple[list[str], int]:
    """HOST:PORT of each host in a list, and which is this machine.

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
    refuse_loopback([address.rpartition(":")[0] for address in addresses], "--hosts")
    return addresses, here[0]


def refuse_loopback(hosts: Sequence[str], flag: str) -> None:
    """Raises UserError where the hosts of a flag are localhost and other machines."""
    elsewhere = [host for host in hosts if host != "localhost" and not host.startswith("127.")]
    if elsewhere and any(host in LOOPBACK for host in hosts):
        raise UserError(
            f"{flag} lists {LOOPBACK[0]} beside {elsewhere[0]!r}, which would not find it under that name. Write this "
            f"machine's own name, such as {socket.gethostname()!r}."
        )


def read_addresses(text: str) -> list[str]:
    """HOST:PORT of each host in the list; raises UserError."""
    listed = text
    with contextlib.suppress(OSError, ValueError):  # it is no file
        listed = ",".join(line.partition("#")[0] for line in Path(text).read_text().splitlines())
    addresses = []
    for part in filter(None, (part.strip() for part in listed.split(","))):
        host, colon, port = part.rpartition(":") if part.count(":") == 1 or "]" in part else (part, "", "")
        if not colon or part.endswith("]"):
            host, port = part, str(PORT)
        if mistake := tf_config.address_mistake(f"{host}:{port}"):
            raise UserError(
                f"--hosts takes HOST or HOST:PORT, separated by commas, or a file; received {part!r}: {mistake}"
            )
        addresses.append(f"{host}:{port}")
    if len(set(addresses)) < len(addresses):
        twice = next(each for each in addresses if addresses.count(each) > 1)
        raise UserError(f"--hosts names {twice} twice. Write each host once.")
    if len(addresses) < 2:
        missing = f", and there is no file {text!r}" if addresses and listed is text else ""
        raise UserError(f"--hosts={text} names {len(addresses)} hosts{missing}. Write all of them: --hosts=a,b")
    return addresses


def get_own_addresses() -> set[str]:
    """The addresses of this machine's network interfaces."""
    return set().union(*_get_interfaces().values())


def find_interface(address: str) -> str:
    """The network interface that has this machine's HOST:PORT."""
    own = _resolve(address, get_own_addresses())
    return next(name for name, addresses in _get_interfaces().items() if addresses & own)


def check_own_name() -> None:
    """Raises UserError unless this machine's name has an address of its own, not of loopback, for Horovod."""
    name = os.uname().nodename
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if address not in get_own_addresses() or address.startswith("127."):
        raise UserError(
            f"Horovod's workers connect to the address of this machine's name, and {name!r} has {address}. Write its "
            "address and its name into /etc/hosts, or leave --launcher=horovod out."
        )


def _get_interfaces() -> dict[str, set[str]]:
    """The addresses of each network interface, loopback the last."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: {each.address.partition("%")[0] for each in some if each.family in families}
        for name, some in psutil.net_if_addrs().items()
    }
    return dict(sorted(found.items(), key=lambda item: "127.0.0.1" in item[1]))


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
