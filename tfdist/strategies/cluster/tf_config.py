"""Which workers make up the run and which of them this process is: the only reader of TF_CONFIG.

Invariant: a `Cluster` that exists is sound. Every address is host:port, no two tasks share one, and this process is
one of the workers. Whatever TF_CONFIG says wrongly is a `UserError` that names it and shows what to write instead.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Any

from tfdist.errors import UserError, suggest

VARIABLE = "TF_CONFIG"
JOBS = ("chief", "worker")  # in the order in which TensorFlow counts them
_HOST = re.compile(r"([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
_EXAMPLE_JOBS: dict[str, Any] = {"worker": ["host0:2222", "host1:2222"]}


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
        """How messages name a worker, with TF_CONFIG's name where it differs: "worker 1", "worker 0 (the chief)"."""
        if not self.has_chief_task:
            return f"worker {worker_index}"
        return f"worker {worker_index} ({f'task worker {worker_index - 1}' if worker_index else 'the chief'})"


def read_tf_config(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster of TF_CONFIG; None where it is not set, empty or `{}`.

    Raises:
      UserError: it does not describe a cluster that this process is a worker of.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return None
    config = _parse(text)
    if not config:
        return None
    jobs = _check_jobs(config)
    _check_addresses(jobs)
    task_type, task_index = _check_task(config, jobs)
    workers = tuple(address for job in JOBS for address in jobs.get(job, []))
    return Cluster(workers, task_type, task_index, has_chief_task=bool(jobs.get("chief")))


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


def _wrong(
    what: str,
    received: Any,
    jobs: Mapping[str, Any] | None = None,
    task: tuple[str, int] | None = None,
    *,
    is_raw: bool = False,
) -> UserError:
    """The error for a mistake in TF_CONFIG, with a complete example made from what was right of it."""
    jobs = jobs or _EXAMPLE_JOBS
    job, index = task or (next(iter(jobs)), 0)
    example = json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})
    shown = received if is_raw else json.dumps(received)
    return UserError(f"{VARIABLE}: {what}\n  Received: {shown}\n  Write, for example: {VARIABLE}='{example}'")


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        hint = " JSON wants double quotes." if "'" in text else ""
        near = text[max(0, error.pos - 15) : error.pos + 15]
        raise _wrong(f"not JSON: {error.msg} at {where}, near {near!r}.{hint}", text, is_raw=True) from error
    if not isinstance(config, dict):
        raise _wrong(f"must be a JSON object with 'cluster' and 'task', not {_kind(config)}.", config)
    return config


def _check_jobs(config: dict[str, Any]) -> dict[str, list[str]]:
    if "cluster" not in config:
        raise _wrong(f"has no 'cluster'.{_suggest_key('cluster', config)}", config)
    jobs = config["cluster"]
    if not isinstance(jobs, dict):
        raise _wrong(f"'cluster' must be an object of job names and their addresses, not {_kind(jobs)}.", jobs)
    for job, addresses in jobs.items():
        _check_job_name(job, jobs)
        if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
            fixed = {**jobs, job: [addresses] if isinstance(addresses, str) else _EXAMPLE_JOBS["worker"]}
            raise _wrong(f'cluster.{job} must be a list of "host:port" strings.', addresses, _supported(fixed))
    if not any(jobs.values()):
        raise _wrong("'cluster' names no worker.", jobs)
    if len(jobs.get("chief", [])) > 1:
        one_chief = {"chief": jobs["chief"][:1], "worker": jobs["chief"][1:] + jobs.get("worker", [])}
        what = f"cluster.chief has {len(jobs['chief'])} addresses; there can be one chief, the others are workers."
        raise _wrong(what, jobs["chief"], one_chief)
    return jobs


def _check_job_name(job: str, jobs: dict[str, Any]) -> None:
    if job in JOBS:
        return
    what = f"cluster.{job}: there is no such job; the jobs are 'worker' and, if wanted, 'chief'.{suggest(job, JOBS)}"
    if job == "ps":
        what = "cluster.ps: parameter servers are not supported. tfdist trains synchronously: all tasks are workers."
    elif job == "evaluator":
        what = "cluster.evaluator: tfdist evaluates on all workers; leave the evaluator out and do not start it."
    raise _wrong(what, jobs, _supported(jobs))


def _supported(jobs: dict[str, Any]) -> dict[str, Any]:
    """The jobs of `jobs` that may stay, for an example."""
    return {
        job: addresses for job, addresses in jobs.items() if job in JOBS and addresses and isinstance(addresses, list)
    }


def _check_addresses(jobs: dict[str, list[str]]) -> None:
    seen: dict[str, str] = {}
    for job in JOBS:
        for index, address in enumerate(jobs.get(job, [])):
            task = f"cluster.{job}[{index}]"
            if mistake := address_mistake(address):
                raise UserError(f"{VARIABLE}: {task} must be host:port: {mistake}\n  Received: {address!r}")
            if address.lower() in seen:
                raise UserError(
                    f"{VARIABLE}: {seen[address.lower()]} and {task} have the same address; every task needs its own. "
                    f"On one machine give each another port.\n  Received: {address!r}"
                )
            seen[address.lower()] = task


def address_mistake(address: str) -> str | None:
    """What is wrong with host:port and what to write instead; None for a sound address."""
    without_scheme = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*://", "", address).rstrip("/")
    if without_scheme != address:
        return f"it is not a URL. Write {without_scheme!r}."
    if not address or re.search(r"\s", address):
        return f"it must not be empty or hold spaces. Write {''.join(address.split()) or 'host0:2222'!r}."
    host, colon, port = address.rpartition(":")
    if not colon:
        return f"it has no port. Write {address + ':2222'!r}."
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"an IPv6 address stands in brackets. Write '[{host}]:{port}'."
    if not host:
        return f"it has no host. Write {'host0:' + port!r}."
    if not (_HOST.fullmatch(host) or _is_ipv6(host)):
        return f"{host!r} is not a host name."
    if not re.fullmatch(r"[0-9]+", port):
        return f"the port {port!r} is not a number. Write {host + ':2222'!r}."
    if not 1 <= int(port) <= 65535:
        return f"the port {port} is not between 1 and 65535. Write {host + ':2222'!r}."
    return None


def _is_ipv6(host: str) -> bool:
    try:
        return host.startswith("[") and bool(ipaddress.IPv6Address(host[1:-1]))
    except ValueError:
        return False


def _check_task(config: dict[str, Any], jobs: dict[str, list[str]]) -> tuple[str, int]:
    if "task" not in config:
        what = "has no 'task': which of the cluster's tasks is this process?"
        raise _wrong(what + _suggest_key("task", config), config, _supported(jobs))
    task = config["task"]
    if not isinstance(task, dict):
        raise _wrong(f"'task' must be an object with 'type' and 'index', not {_kind(task)}.", task, _supported(jobs))
    for key in ("type", "index"):
        if key not in task:
            raise _wrong(f"task.{key} is missing.{_suggest_key(key, task)}", task, _supported(jobs))
    job = _check_task_type(task["type"], jobs)
    return job, _check_task_index(task["index"], job, jobs)


def _check_task_type(job: Any, jobs: dict[str, list[str]]) -> str:
    if job == "evaluator":
        what = "task.type: tfdist evaluates on all workers; do not start an evaluator."
        raise _wrong(what, job, _supported(jobs))
    if not isinstance(job, str) or not jobs.get(job):
        known = " and ".join(repr(known) for known in _supported(jobs))
        near = suggest(job, jobs) if isinstance(job, str) else ""
        raise _wrong(f"task.type is none of the cluster's jobs, {known}.{near}", job, _supported(jobs))
    return job


def _check_task_index(index: Any, job: str, jobs: dict[str, list[str]]) -> int:
    is_number = isinstance(index, int) and not isinstance(index, bool)
    is_digits = isinstance(index, str) and re.fullmatch(r"-?[0-9]+", index)
    if not (is_number or is_digits):
        raise _wrong("task.index must be a whole number.", index, _supported(jobs), (job, 0))
    count = len(jobs[job])
    if not 0 <= int(index) < count:
        last = f"from 0 to {count - 1}" if count > 1 else "0"
        what = f"task.index is out of range: cluster.{job} has {count} task{'s' * (count > 1)}, so it is {last}."
        raise _wrong(what, index, _supported(jobs), (job, min(max(int(index), 0), count - 1)))
    return int(index)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _suggest_key(key: str, received: Mapping[str, Any]) -> str:
    """Says which of the received keys was probably meant to be `key`."""
    near = [name for name in received if suggest(name, [key])]
    return f" Is {near[0]!r} meant to be {key!r}?" if near else ""
