"""Which workers make up the run and which of them this process is: the only reader of TF_CONFIG.

Invariant: a `Cluster` that exists is sound. Every address is host:port, no two tasks share one, and this process is
one of the workers. Whatever TF_CONFIG says wrongly is a `UserError` that names it and shows an example.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from tfdist.errors import UserError, build_user_error, is_whole_number, suggest

VARIABLE = "TF_CONFIG"
JOBS = ("chief", "worker")  # in the order in which TensorFlow counts them
EVALUATOR = "evaluator"  # a task that evaluates a run's checkpoints, alone
_HOST = re.compile(r"([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a run and this process's place among them.

    Attributes:
      workers: host:port of each, a `chief` task in front, as TensorFlow counts them.
      task_type: "chief" or "worker", as TF_CONFIG names this task.
      task_index: this task's index among those of its type.
    """

    workers: tuple[str, ...]
    task_type: str
    task_index: int
    has_chief_task: bool = False

    @property
    def worker_index(self) -> int:
        return self.task_index + (self.has_chief_task and self.task_type == "worker")

    @property
    def num_workers(self) -> int:
        return len(self.workers)

    @property
    def is_chief(self) -> bool:
        return self.worker_index == 0

    @property
    def address(self) -> str:
        """This worker's own host:port."""
        return self.workers[self.worker_index]

    @property
    def is_of_one_machine(self) -> bool:
        """Whether all workers are at loopback addresses, as `tfdist.launch` starts them."""
        return all(is_loopback(split_address(address)[0]) for address in self.workers)

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The cluster as `tf.train.ClusterSpec` takes it."""
        chiefs, workers = list(self.workers[: self.has_chief_task]), list(self.workers[self.has_chief_task :])
        return {job: addresses for job, addresses in (("chief", chiefs), ("worker", workers)) if addresses}

    def task_name(self, worker_index: int) -> str:
        """Returns a worker's name in messages, with TF_CONFIG's where it differs: "worker 0 (the chief)"."""
        if not self.has_chief_task:
            return f"worker {worker_index}"
        return f"worker {worker_index} ({f'task worker {worker_index - 1}' if worker_index else 'the chief'})"


def take_evaluator(environment: MutableMapping[str, str]) -> bool:
    """Whether TF_CONFIG names this process the run's evaluator; the variable goes, as that computes alone."""
    try:
        task = json.loads(environment.get(VARIABLE, "")).get("task", {})
    except (ValueError, AttributeError):
        return False
    if not isinstance(task, dict) or task.get("type") != EVALUATOR:
        return False
    if task.get("index", 0) not in (0, "0"):
        raise _error(f"a run has one evaluator, whose task.index is 0; received {task['index']!r}", task)
    del environment[VARIABLE]
    return True


def read_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster of TF_CONFIG; None where it is not set, empty or `{}`.

    Raises:
      UserError: it does not describe a cluster that this process is a worker of.
    """
    text = environment.get(VARIABLE, "").strip()
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        raise _error(f"it is not JSON, which wants double quotes: {error}", text) from error
    if config == {}:
        return None
    match config:
        case {"cluster": dict(jobs), "task": {"type": job, "index": index}}:
            _check_jobs(jobs)
        case _:
            raise _error("it must have 'cluster', jobs with addresses, and 'task', with 'type' and 'index'", config)
    if job == EVALUATOR:
        raise _error("task.type 'evaluator' follows a run: python -m tfdist.main --mode=evaluate --follow", config)
    if not isinstance(job, str) or not jobs.get(job):
        known = [name for name in JOBS if jobs.get(name)]
        near = suggest(job, known) if isinstance(job, str) else ""
        raise _error(f"task.type is none of the cluster's jobs, {' and '.join(map(repr, known))}.{near}", job)
    number = int(index) if isinstance(index, str) and re.fullmatch("[0-9]+", index) else index
    if not is_whole_number(number, least=0) or number >= len(jobs[job]):
        raise _error(f"task.index is not a whole number from 0 to {len(jobs[job]) - 1}, as cluster.{job} has", index)
    workers = tuple(address for name in JOBS for address in jobs.get(name, []))
    return Cluster(workers, job, number, has_chief_task=bool(jobs.get("chief")))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, which no other machine reaches by it; other names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a checked address; an IPv6 host loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def address_mistake(address: str) -> str | None:
    """Returns what is wrong with a host:port; None for a sound address."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return f"it has no port. Write {address + ':2222'!r}."
    if ":" in host and "//" not in host and not host.startswith("["):
        return f"an IPv6 address stands in brackets. Write '[{host}]:{port}'."
    if not (_HOST.fullmatch(host) or _is_ipv6(host)):
        return f"{host!r} is not a host name."
    if not re.fullmatch(r"[0-9]+", port) or not 1 <= int(port) <= 65535:
        return f"the port {port!r} is not a number between 1 and 65535."
    return None


def _is_ipv6(host: str) -> bool:
    try:
        return host.startswith("[") and bool(ipaddress.IPv6Address(host[1:-1]))
    except ValueError:
        return False


def _check_jobs(jobs: Mapping[str, Any]) -> None:
    seen: dict[str, str] = {}
    for job, addresses in jobs.items():
        if job not in (*JOBS, EVALUATOR):
            raise _error(
                f"cluster.{job}: the jobs are 'worker' and, if wanted, 'chief' and 'evaluator'. There are no parameter "
                f"servers.{suggest(job, (*JOBS, EVALUATOR))}",
                jobs,
            )
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            raise _error(f'cluster.{job} must be a list of "host:port" strings', addresses)
        for index, address in enumerate(addresses):
            task = f"cluster.{job}[{index}]"
            if mistake := address_mistake(address):
                raise _error(f"{task} must be host:port: {mistake}", address)
            if other := seen.get(address.lower()):
                raise _error(f"{other} and {task} have the same address; every task needs its own", address)
            seen[address.lower()] = task
    if not any(jobs.get(job) for job in JOBS):
        raise _error("'cluster' names no worker", jobs)
    if len(jobs.get("chief", [])) > 1:
        raise _error("cluster.chief must be one address; the others are workers", jobs["chief"])


def _error(what: str, received: Any) -> UserError:
    shown = received if isinstance(received, str) else json.dumps(received)
    return build_user_error(
        f"{VARIABLE}: {what}\n  Received: {shown}\n  Write, for example: {VARIABLE}='{EXAMPLE}'",
        error_id="cluster-mismatch",
    )
