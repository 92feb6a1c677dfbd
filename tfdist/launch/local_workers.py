"""Processes on this machine that find each other through TF_CONFIG: all workers (launcher tf_config), or one (host).

With the launcher host the same command on each host makes a cluster that heals: when a worker is lost, those of the
other hosts end with status 4, each host's supervisor starts its own again, and they wait until all are back.

Invariant: no other program can take a worker's port while the workers run. The launcher keeps each port bound, not
listening and with SO_REUSEADDR, which on Linux lets the worker (its server sets that too) listen there, and keeps the
kernel from giving the port to anybody who asks for a free one or connects outwards.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.errors import UserError
from tfdist.launch.plan import Plan
from tfdist.launch.processes import GPU_VARIABLE, Process, Worker, deal
from tfdist.launch.supervise.output import STDERR, STDOUT, Output
from tfdist.strategies.cluster.tf_config import read_tf_config
from tfdist.telemetry.heartbeat import VARIABLE as HEARTBEAT_VARIABLE

HOST = "127.0.0.1"


@contextlib.contextmanager
def start(plan: Plan, output: Output) -> Iterator[Sequence[Worker]]:
    """Starts the workers, each with its part of the GPUs that CUDA_VISIBLE_DEVICES names.

    None is left when the context ends, whatever ends it.
    """
    with contextlib.ExitStack() as at_end:
        ports = [at_end.enter_context(reserve_port()) for _ in plan.slot_numbers]
        addresses = [f"{HOST}:{port.getsockname()[1]}" for port in ports]
        named = [name for name in plan.environment.get(GPU_VARIABLE, "").split(",") if name]
        gpus = [{GPU_VARIABLE: ",".join(part)} for part in deal(named, len(ports))] if named else [{}] * len(ports)
        own = {index: {"TF_CONFIG": tf_config(addresses, index), **gpus[index]} for index in range(len(addresses))}
        yield at_end.enter_context(start_each(plan, output, own))


def read_worker_index(environment: Mapping[str, str]) -> int:
    """Returns the index of this host's worker in the cluster that TF_CONFIG describes.

    Raises:
      UserError: TF_CONFIG does not say.
    """
    cluster = read_tf_config(environment)
    if cluster is None:
        raise UserError(
            "--launcher=host starts the worker that TF_CONFIG names, and TF_CONFIG is not set. Set it on each host, or "
            "leave --launcher out to start all workers on this machine."
        )
    return cluster.worker_index


def start_one(plan: Plan, output: Output) -> contextlib.AbstractContextManager[Sequence[Worker]]:
    """Starts this host's worker, with TF_CONFIG as it was given."""
    return start_each(plan, output, {plan.first_index: {}})


@contextlib.contextmanager
def start_each(plan: Plan, output: Output, own: Mapping[int, Mapping[str, str]]) -> Iterator[Sequence[Worker]]:
    """Starts the workers of these numbers, each with variables of its `own`, and passes on what they write.

    None is left when the context ends, whatever ends it.
    """
    workers: list[Process] = []
    with contextlib.ExitStack() as at_end:
        directory = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-launch-")))
        at_end.callback(output.drain)
        at_end.callback(_kill, workers)
        for (index, variables), cpus in zip(own.items(), plan.cpus, strict=True):
            heartbeat = directory / f"{index}.heartbeat"
            environment = (
                plan.environment | plan.own_variables(index) | dict(variables) | {HEARTBEAT_VARIABLE: str(heartbeat)}
            )
            workers.append(Process(index, plan.command, environment, cpus, heartbeat))
        for worker in workers:
            for pipe, stream in zip(worker.pipes, (STDOUT, STDERR), strict=True):
                output.follow(pipe, stream, worker.index)
        yield workers


def tf_config(addresses: Sequence[str], index: int) -> str:
    """TF_CONFIG of one of the workers at these addresses."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})


def reserve_port() -> socket.socket:
    """A socket that keeps a free port for a worker that listens with SO_REUSEADDR.

    The port is kept at all addresses of this machine, IPv4 and IPv6, since TensorFlow's server listens at all of them.
    """
    is_dual = socket.has_dualstack_ipv6()
    sock = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_dual:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("", 0))
    return sock


def _kill(workers: Sequence[Process]) -> None:
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        worker.wait()
