"""Which part this process has in a sweep over a cluster, by KerasTuner's variables or by TF_CONFIG.

Invariant: a `Role` that exists is sound: its address is host:port. `sweep.py` asks once, before anything is started.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping

from tfdist.errors import UserError
from tfdist.strategies import cluster, environment

TUNER_ID, IP, PORT = "KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT"
CHIEF = "chief"
LOOPBACK = "127.0.0.1"
VARIABLES = (TUNER_ID, IP, PORT, cluster.VARIABLE)
_EXAMPLE = f"{TUNER_ID}=chief {IP}=10.0.0.1 {PORT}=8000, and on the workers {TUNER_ID}=tuner0 and so on"


@dataclasses.dataclass(frozen=True)
class Role:
    """A part in a sweep over a cluster.

    Attributes:
      name: how messages name this process.
      address: host:port at which the chief listens.
      source: the variables that say so.
      trains: whether trials run here.
    """

    name: str
    address: str
    source: str
    is_chief: bool
    trains: bool


def find_role(variables: Mapping[str, str]) -> Role | None:
    """The role of this process; None for a sweep of one machine.

    Raises:
      UserError: the variables do not say it.
    """
    mark = environment.first_set(environment.HOROVOD_MARKS, variables)
    if mark is not None:
        raise UserError(
            f"{mark} is set, so this is one of several processes of Horovod's. A sweep starts those of its trials "
            "itself: start --mode=tune without horovodrun and write tune.workers_per_trial = 2."
        )
    member = cluster.read_tf_config(variables)
    by_config = member if member is not None and member.num_workers > 1 else None
    names = [name for name in (TUNER_ID, IP, PORT) if variables.get(name)]
    if not names:
        return None if by_config is None else _of_cluster(by_config)
    if by_config is not None:
        raise UserError(
            f"{names[0]} and TF_CONFIG are both set, and each says who takes part in the sweep. Unset one of them. "
            "(Trials that are spread over several machines are not supported.)"
        )
    return _of_variables(variables)


def _of_cluster(member: cluster.Cluster) -> Role:
    name = f"{member.task_name(member.worker_index)} of TF_CONFIG"
    return Role(_named(name), member.workers[0], cluster.VARIABLE, is_chief=member.is_chief, trains=True)


def _of_variables(variables: Mapping[str, str]) -> Role:
    """As KerasTuner has it: an identity with `chief` in it is the chief's, which does not train."""
    given = {name: variables.get(name, "") for name in (TUNER_ID, IP, PORT)}
    missing = [name for name in (TUNER_ID, PORT) if not given[name]]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{' and '.join(missing)} {verb} not set, and other KERASTUNER_ variables are. Write {_EXAMPLE}."
        )
    host = given[IP] or LOOPBACK
    address = f"[{host}]:{given[PORT]}" if host.count(":") > 1 and not host.startswith("[") else f"{host}:{given[PORT]}"
    if mistake := cluster.address_mistake(address):
        raise UserError(f"{IP} and {PORT} make no address: {mistake}\n  Received: {given[IP]!r} and {given[PORT]!r}")
    is_chief = CHIEF in given[TUNER_ID]
    return Role(_named(given[TUNER_ID]), address, IP, is_chief=is_chief, trains=not is_chief)


def _named(name: str) -> str:
    return f"{name} (host {socket.gethostname()}, process {os.getpid()})"
