"""The launcher host: one process, the worker of this host in a cluster that TF_CONFIG describes.

The same command on each host makes a cluster that heals: when a worker is lost, those of the other hosts end with
status 4, each host's supervisor starts its own again, and they wait for each other until all are back.

Invariant: TF_CONFIG reaches the worker as it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from tfdist.errors import UserError
from tfdist.launch import local
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Worker
from tfdist.launch.supervise.output import Output
from tfdist.strategies.cluster.tf_config import read_tf_config


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


def start(plan: Plan, output: Output) -> contextlib.AbstractContextManager[Sequence[Worker]]:
    """Starts the worker; it is gone when the context ends, whatever ends it."""
    return local.start_each(plan, output, {plan.first_index: {}})
