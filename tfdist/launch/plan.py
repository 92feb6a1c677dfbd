"""What is to be started: the workers, their command and their environment.

Invariant: a `Plan` holds all that a launcher needs; nothing below `__main__.py` reads this process's environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
_THIS_MACHINE = ("127.0.0.1", "localhost")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A start of `num_workers` processes of `command`."""

    num_workers: int
    command: tuple[str, ...]
    environment: dict[str, str]
    pin_cpus: bool = False


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment as workers on this machine need it.

    Lines appear when they are printed, and a proxy does not stand between the workers, as gRPC else arranges it.
    """
    changed = {**environment, "PYTHONUNBUFFERED": "1"}
    changed.pop("TF_CONFIG", None)
    if any(environment.get(name) for name in PROXY_VARIABLES):
        direct = [h for h in (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",") if h]
        direct += [host for host in _THIS_MACHINE if host not in direct]
        changed["no_proxy"] = changed["NO_PROXY"] = ",".join(direct)
    return changed
