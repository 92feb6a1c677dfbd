"""What carries the collectives: RDMA adapters, NCCL's variables, proxies.

The variables are described at https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.doctor.findings import PROBLEM, WARNING, Finding, ok_finding
from tfdist.strategies.cluster.tf_config import Cluster, split_address

GROUP = "network"
INFINIBAND = Path("/sys/class/infiniband")
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def list_adapters(directory: Path = INFINIBAND) -> list[Path]:
    """The ports of InfiniBand and RoCE adapters, as Linux tells of them."""
    return sorted(directory.glob("*/ports/*"))


def check_network(
    environment: Mapping[str, str], *, num_gpus: int, peers: Sequence[str] = (), adapters: Sequence[Path] = ()
) -> list[Finding]:
    """Findings about what carries the collectives.

    Args:
      num_gpus: without any, NCCL is not used, and what only it needs is left out.
      peers: the hosts of the other workers.
      adapters: ports of RDMA adapters.
    """
    active = [port for port in adapters if "ACTIVE" in _read_text(port / "state")]
    findings = []
    if active:
        shown = ", ".join(f"{p.parents[1].name} port {p.name} ({_read_text(p / 'link_layer')})" for p in active)
        findings.append(ok_finding(GROUP, f"RDMA adapters: {shown}"))
    elif adapters:
        what = f"{len(adapters)} ports of RDMA adapters are there and none is active"
        why = "NCCL then goes by TCP, several times slower."
        findings.append(Finding(WARNING, GROUP, what, why, "See `ibstat`: is the cable in, does a subnet manager run?"))
    disabled = environment.get("NCCL_IB_DISABLE") or "0"
    if num_gpus and active and disabled != "0":
        what = f"NCCL_IB_DISABLE={disabled} with {len(active)} active RDMA ports"
        why = "NCCL leaves the adapters alone and goes by TCP, several times slower."
        findings.append(Finding(WARNING, GROUP, what, why, "Unset NCCL_IB_DISABLE, or set it to 0, on all workers."))
    findings += _check_proxies(environment, peers)
    given = {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "no NCCL_ variable is set"
    uses = "" if num_gpus else "; without a GPU NCCL is not used"
    return [*findings, ok_finding(GROUP, shown + uses, nccl=given, infiniband=[str(port) for port in active])]


def _check_proxies(environment: Mapping[str, str], peers: Sequence[str]) -> list[Finding]:
    """gRPC sends what is meant for the workers through a proxy, unless no_proxy names them."""
    name = next((n for p in PROXIES for n in (p, p.upper()) if environment.get(n)), None)
    direct = [each.strip() for each in (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")]
    ends = tuple(f".{each.lstrip('.')}" for each in direct if each)
    caught = [peer for peer in peers if peer not in direct and not peer.endswith(ends)]
    if name is None or not caught:
        return []
    what = f"{name} is set and no_proxy does not name {', '.join(caught[:3])}"
    why = "gRPC then sends what is meant for the workers through the proxy, and they wait an hour for each other."
    return [Finding(PROBLEM, GROUP, what, why, f"Set on all workers: no_proxy={','.join(dict.fromkeys(caught))}")]


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def list_other_hosts(cluster: Cluster) -> list[str]:
    """The hosts of the other workers."""
    others = [address for i, address in enumerate(cluster.workers) if i != cluster.worker_index]
    return list(dict.fromkeys(split_address(address)[0] for address in others))
