"""The launcher host: one process, the worker of this host in a cluster that TF_CONFIG describes.

The same command on each host makes a cluster that heals: when a worker is lost, those of the other hosts end with
status 4, each host's supervisor starts its own again, and they wait for each other until all are back.

Invariant: TF_CONFIG reaches the worker as it was given.

Called by `__main__.py`.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.errors import UserError
from tfdist.launch.output import STDERR, STDOUT, Output
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Process, Worker
from tfdist.strategies.cluster import read_tf_config
from tfdist.telemetry.pulse import VARIABLE as PULSE_VARIABLE

_DRAIN_SECONDS = 5.0


def worker_index(environment: Mapping[str, str]) -> int:
    """Which worker of the cluster this host's is.

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


@contextlib.contextmanager
def start(plan: Plan, output: Output) -> Iterator[Sequence[Worker]]:
    """Starts the worker; it is gone when the context ends, whatever ends it."""
    with contextlib.ExitStack() as at_end:
        directory = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-launch-")))
        at_end.callback(output.drain, _DRAIN_SECONDS)
        index = plan.first_index
        pulse = directory / f"{index}.pulse"
        environment = plan.environment | plan.own_variables(index) | {PULSE_VARIABLE: str(pulse)}
        worker = Process(index, plan.command, environment, plan.cpus[0], pulse)
        at_end.callback(worker.wait)
        at_end.callback(worker.send, signal.SIGKILL)
        for pipe, stream in zip(worker.pipes, (STDOUT, STDERR), strict=True):
            output.follow(pipe, stream, lambda line: [(index, line)])
        yield [worker]
