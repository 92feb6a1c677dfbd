"""Which part this process has in a sweep over a cluster, by KerasTuner's variables or by TF_CONFIG.

Invariant: a `Role` that exists is sound: its address is host:port, and where other machines can reach that there is a
secret. `sweep.py` asks once, before anything is started.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from tfdist.errors import UserError
from tfdist.strategies.cluster import environment, tf_config

TUNER_ID, IP, PORT = "KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT"
CHIEF = "chief"
LOOPBACK = "127.0.0.1"
SECRET, SECRET_FILE = "TFDIST_SWEEP_SECRET", "TFDIST_SWEEP_SECRET_FILE"
LEAST_SECRET = 16  # characters
VARIABLES = (TUNER_ID, IP, PORT, SECRET, SECRET_FILE, tf_config.VARIABLE)
_MAKE_SECRET = "python -c 'import secrets; print(secrets.token_hex(32))' > FILE"
_EXAMPLE = f"{TUNER_ID}=chief {IP}=10.0.0.1 {PORT}=8000, and on the workers {TUNER_ID}=tuner0 and so on"


@dataclasses.dataclass(frozen=True)
class Role:
    """A part in a sweep over a cluster.

    Attributes:
      name: how messages name this process.
      address: host:port at which the chief listens.
      source: the variables that say so.
      trains: whether trials run here.
      secret: which all processes of the sweep have; empty where none was given.
    """

    name: str
    address: str
    source: str
    is_chief: bool
    trains: bool
    secret: bytes = dataclasses.field(default=b"", repr=False)


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
    member = tf_config.read_tf_config(variables)
    by_config = member if member is not None and member.num_workers > 1 else None
    names = [name for name in (TUNER_ID, IP, PORT) if variables.get(name)]
    if not names:
        return None if by_config is None else _with_secret(_of_cluster(by_config), variables)
    if by_config is not None:
        raise UserError(
            f"{names[0]} and TF_CONFIG are both set, and each says who takes part in the sweep. Unset one of them. "
            "(Trials that are spread over several machines are not supported.)"
        )
    return _with_secret(_of_variables(variables), variables)


def _of_cluster(member: tf_config.Cluster) -> Role:
    name = f"{member.task_name(member.worker_index)} of TF_CONFIG"
    return Role(_named(name), member.workers[0], tf_config.VARIABLE, is_chief=member.is_chief, trains=True)


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
    if mistake := tf_config.address_mistake(address):
        raise UserError(f"{IP} and {PORT} make no address: {mistake}\n  Received: {given[IP]!r} and {given[PORT]!r}")
    is_chief = CHIEF in given[TUNER_ID]
    return Role(_named(given[TUNER_ID]), address, IP, is_chief=is_chief, trains=not is_chief)


def _with_secret(role: Role, variables: Mapping[str, str]) -> Role:
    """The role with the sweep's secret; raises UserError where there has to be one, and is none that will do."""
    secret, source = variables.get(SECRET, ""), SECRET
    if path := variables.get(SECRET_FILE, ""):
        if secret:
            raise UserError(f"{SECRET} and {SECRET_FILE} are both set. Unset one of them.")
        try:
            secret, source = Path(path).read_text(), f"The file of {SECRET_FILE}, {path},"
        except (OSError, ValueError) as error:
            raise UserError(f"The secret of the sweep cannot be read: {SECRET_FILE} = {path!r}: {error}") from error
    secret = secret.strip()
    if secret and len(secret) < LEAST_SECRET:
        raise UserError(
            f"{source} holds {len(secret)} characters; a sweep's secret has at least {LEAST_SECRET}. Make one with: "
            f"{_MAKE_SECRET}"
        )
    if not secret and not tf_config.is_loopback(tf_config.split_address(role.address)[0]):
        raise UserError(
            f"The chief of the sweep is to be reached at {role.address} ({role.source}), where others can reach it "
            f"too, and there is no secret. Make one with: {_MAKE_SECRET}, and set {SECRET_FILE}=FILE for the chief "
            "and all workers."
        )
    return dataclasses.replace(role, secret=secret.encode())


def _named(name: str) -> str:
    return f"{name} (host {socket.gethostname()}, process {os.getpid()})"
