"""The settings of NCCL and the network that carries it: InfiniBand or RoCE, interfaces, proxies.

Reads what Linux says below /sys; `Host` names the places, so that tests can show it another machine. The variables are
described at https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.doctor.findings import NOTE, PROBLEM, WARNING, Finding, fine
from tfdist.strategies.cluster.tf_config import Cluster, is_loopback, split_address

GROUP = "network"
VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "cali", "flannel", "tun", "tap", "dummy")
PORTS_OF_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclasses.dataclass(frozen=True)
class Host:
    """Where Linux tells of its network."""

    infiniband: Path = Path("/sys/class/infiniband")
    interfaces: Path = Path("/sys/class/net")

    def adapters(self) -> list[Path]:
        """The ports of InfiniBand and RoCE adapters."""
        return sorted(self.infiniband.glob("*/ports/*"))

    def active_adapters(self) -> list[Path]:
        return [port for port in self.adapters() if "ACTIVE" in _text(port / "state")]

    def interface_names(self) -> list[str]:
        return sorted(path.name for path in self.interfaces.glob("*"))


def check_network(
    environment: Mapping[str, str], *, num_gpus: int, peers: Sequence[str] = (), host: Host | None = None
) -> list[Finding]:
    """Findings about what carries the collectives.

    Args:
      num_gpus: without any, NCCL is not used, and what only it needs is left out.
      peers: the hosts of the other workers.
    """
    host = host or Host()
    adapters, active = host.adapters(), host.active_adapters()
    findings = [_adapters(adapters, active)] if adapters else []
    if num_gpus:
        findings += _disabled_adapters(environment, active)
    findings += _interfaces(environment, host, num_gpus)
    findings += _proxies(environment, peers)
    given = {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "no NCCL_ variable is set"
    uses = "" if num_gpus else "; without a GPU NCCL is not used"
    return [*findings, fine(GROUP, shown + uses, nccl=given, infiniband=[str(port) for port in active])]


def _adapters(adapters: Sequence[Path], active: Sequence[Path]) -> Finding:
    if active:
        shown = ", ".join(f"{p.parents[1].name} port {p.name} ({_text(p / 'link_layer')})" for p in active)
        return fine(GROUP, f"RDMA adapters: {shown}")
    return Finding(
        WARNING,
        GROUP,
        f"{len(adapters)} ports of RDMA adapters are there and none is active",
        "NCCL then goes by TCP, several times slower.",
        "See `ibstat`: is the cable in, does a subnet manager run?",
    )


def _disabled_adapters(environment: Mapping[str, str], active: Sequence[Path]) -> list[Finding]:
    value = environment.get("NCCL_IB_DISABLE", "0")
    if not active or value in ("", "0"):
        return []
    return [
        Finding(
            WARNING,
            GROUP,
            f"NCCL_IB_DISABLE={value} with {len(active)} active RDMA ports",
            "NCCL leaves the adapters alone and goes by TCP, several times slower.",
            "Unset NCCL_IB_DISABLE, or set it to 0, on all workers.",
        )
    ]


def _interfaces(environment: Mapping[str, str], host: Host, num_gpus: int) -> list[Finding]:
    """NCCL_SOCKET_IFNAME: a list of beginnings of names; "^" before it excludes, "=" wants whole names."""
    text = environment.get("NCCL_SOCKET_IFNAME")
    if not text and not num_gpus:
        return []
    names = host.interface_names()
    real = [name for name in names if not name.startswith(VIRTUAL)]
    if not text:
        if len(real) > 1:
            return [
                Finding(
                    NOTE,
                    GROUP,
                    f"NCCL_SOCKET_IFNAME is not set and there are the interfaces {', '.join(real)}",
                    "NCCL takes the first that is up, which may be one that the other workers cannot reach.",
                    f"Set NCCL_SOCKET_IFNAME to the one of the workers' addresses, such as {real[0]}.",
                )
            ]
        return []
    wanted = text.lstrip("^=").split(",")
    whole = text.lstrip("^").startswith("=")
    found = [n for n in names if any(n == w if whole else n.startswith(w) for w in wanted if w)]
    if text.startswith("^"):
        found = [name for name in names if name not in found]
    if found:
        return []
    return [
        Finding(
            PROBLEM,
            GROUP,
            f"NCCL_SOCKET_IFNAME={text} fits no interface of this machine",
            "NCCL ends with 'no socket interface found'.",
            f"The interfaces are {', '.join(names)}; set one, or unset it.",
        )
    ]


def _proxies(environment: Mapping[str, str], peers: Sequence[str]) -> list[Finding]:
    """gRPC sends what is meant for the workers through a proxy, unless no_proxy names them."""
    name = next((n for p in PROXIES for n in (p, p.upper()) if environment.get(n)), None)
    if name is None:
        return []
    direct = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    caught = [peer for peer in peers if not any(_is_direct(peer, each.strip()) for each in direct)]
    if not caught:
        return []
    return [
        Finding(
            PROBLEM,
            GROUP,
            f"{name} is set and no_proxy does not name {', '.join(caught[:3])}",
            "gRPC then sends what is meant for the workers through the proxy, and they wait an hour for each other.",
            f"Set on all workers: no_proxy={','.join(dict.fromkeys(caught))}",
        )
    ]


def _is_direct(host: str, pattern: str) -> bool:
    return bool(pattern) and (host == pattern or host.endswith("." + pattern.lstrip(".")))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def other_hosts(cluster: Cluster) -> list[str]:
    """The hosts of the other workers."""
    others = [address for i, address in enumerate(cluster.workers) if i != cluster.worker_index]
    return list(dict.fromkeys(split_address(address)[0] for address in others))


def check_port(cluster: Cluster, ports_of_kernel: Path = PORTS_OF_KERNEL) -> list[Finding]:
    """A finding where another program may get this worker's port before the run does."""
    host, port = split_address(cluster.address)
    first, last = map(int, (_text(ports_of_kernel) or "32768 60999").split())
    if not first <= port <= last or is_loopback(host):
        return []
    return [
        Finding(
            WARNING,
            GROUP,
            f"port {port} is one of those that the kernel gives to outgoing connections ({first} to {last})",
            "Any program of this machine may get it just before the run starts.",
            f"Take a port below {first} in TF_CONFIG.",
        )
    ]
