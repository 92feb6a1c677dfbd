"""The settings of NCCL and the network that carries it: InfiniBand or RoCE, interfaces, proxies.

Reads what Linux says below /sys; `Host` names the places, so that tests can show it another machine. The variables are
described at https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.doctor.findings import NOTE, PROBLEM, WARNING, Finding, fine
from tfdist.strategies.cluster.tf_config import Cluster, is_loopback, split_address

GROUP = "network"
GDR_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "TRACE")
VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "cali", "flannel", "tun", "tap", "dummy")
PORTS_OF_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclasses.dataclass(frozen=True)
class Host:
    """Where Linux tells of its network."""

    infiniband: Path = Path("/sys/class/infiniband")
    interfaces: Path = Path("/sys/class/net")
    modules: Path = Path("/proc/modules")

    def adapters(self) -> list[Path]:
        """The ports of InfiniBand and RoCE adapters."""
        return sorted(self.infiniband.glob("*/ports/*"))

    def active_adapters(self) -> list[Path]:
        return [port for port in self.adapters() if "ACTIVE" in _text(port / "state")]

    def interface_names(self) -> list[str]:
        return sorted(path.name for path in self.interfaces.glob("*"))

    def has_peer_memory(self) -> bool:
        """Whether the kernel lets adapters read a GPU's memory."""
        return bool(re.search(r"^(nvidia_peermem|nv_peer_mem) ", _text(self.modules), re.MULTILINE))


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
        findings += _infiniband(environment, host, active)
        findings += _debug(environment)
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


def _infiniband(environment: Mapping[str, str], host: Host, active: Sequence[Path]) -> list[Finding]:
    if not active:
        return []
    findings = []
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        findings.append(
            Finding(
                WARNING,
                GROUP,
                f"NCCL_IB_DISABLE={environment['NCCL_IB_DISABLE']} with {len(active)} active RDMA ports",
                "NCCL leaves the adapters alone and goes by TCP, several times slower.",
                "Unset NCCL_IB_DISABLE, or set it to 0, on all workers.",
            )
        )
    level = environment.get("NCCL_NET_GDR_LEVEL")
    if level and level.upper() not in GDR_LEVELS and not re.fullmatch("[0-5]", level):
        findings.append(
            Finding(
                WARNING,
                GROUP,
                f"NCCL_NET_GDR_LEVEL={level}",
                "NCCL does not know this value and takes its own.",
                f"Set one of {', '.join(GDR_LEVELS)}: how far an adapter and a GPU may be apart for direct transfers.",
            )
        )
    if level and level.upper() in ("LOC", "0"):
        findings.append(
            Finding(
                WARNING,
                GROUP,
                f"NCCL_NET_GDR_LEVEL={level} switches GPUDirect RDMA off",
                "Every byte then goes through the machine's memory.",
                "Set PHB (adapter and GPU at one CPU), or unset it for NCCL's own choice.",
            )
        )
    elif not host.has_peer_memory():
        findings.append(
            Finding(
                WARNING,
                GROUP,
                "the kernel module nvidia_peermem is not loaded",
                "Without it (or DMA-BUF, kernel 5.12 and an open driver) adapters cannot read a GPU's memory: no "
                "GPUDirect RDMA.",
                "Run: modprobe nvidia_peermem; NCCL_DEBUG=INFO then says 'GPU Direct RDMA Enabled'.",
            )
        )
    return findings + _gid_index(environment, active)


def _gid_index(environment: Mapping[str, str], active: Sequence[Path]) -> list[Finding]:
    """RoCE alone chooses among several addresses of a port, of which one speaks RoCE v2 over IPv4."""
    roce = [port for port in active if _text(port / "link_layer") == "Ethernet"]
    good = {port: _roce_v2_indices(port) for port in roce}
    text = environment.get("NCCL_IB_GID_INDEX")
    if not roce or not all(good.values()):
        return []
    wanted = min(set.intersection(*(set(indices) for indices in good.values())), default=None)
    if text is None or text == "-1" or wanted is None:
        return []  # from 2.21 on NCCL chooses by itself
    if any(text not in map(str, indices) for indices in good.values()):
        return [
            Finding(
                WARNING,
                GROUP,
                f"NCCL_IB_GID_INDEX={text} is no RoCE v2 address over IPv4 of {roce[0].parents[1].name}",
                "Packets of the other kinds are not routed, or are refused by the other side; NCCL then hangs or ends.",
                f"Set NCCL_IB_GID_INDEX={wanted}, or unset it: NCCL chooses from 2.21 on.",
            )
        ]
    return []


def _roce_v2_indices(port: Path) -> list[int]:
    kinds = {int(path.name): _text(path) for path in (port / "gid_attrs" / "types").glob("[0-9]*")}
    return sorted(i for i, kind in kinds.items() if kind == "RoCE v2" and "ffff:" in _text(port / "gids" / str(i)))


def _debug(environment: Mapping[str, str]) -> list[Finding]:
    level = environment.get("NCCL_DEBUG")
    if level is None:
        return [
            Finding(
                NOTE,
                GROUP,
                "NCCL_DEBUG is not set",
                "NCCL then keeps to itself why it failed.",
                "Set NCCL_DEBUG=WARN on all workers; INFO also says which network it took, in many lines.",
            )
        ]
    if level.upper() in DEBUG_LEVELS:
        return []
    return [
        Finding(
            NOTE,
            GROUP,
            f"NCCL_DEBUG={level}",
            "NCCL does not know this value and says nothing.",
            f"Set one of {', '.join(DEBUG_LEVELS)}.",
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
