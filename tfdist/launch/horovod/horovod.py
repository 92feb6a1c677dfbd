"""The launcher horovod: N processes on this machine that find each other through Horovod's rendezvous server.

Invariant: server and workers listen on the loopback interface alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tfdist.launch.horovod.rendezvous import serve_rendezvous
from tfdist.launch.local import HOST, start_each
from tfdist.launch.plan import Plan
from tfdist.launch.processes import Worker
from tfdist.launch.supervise.output import Output

# Of a silent worker. One that dies is noticed at once, and on one machine only a stopped one is silent.
DEFAULTS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HOROVOD_GLOO_IFACE": "lo"}


@contextlib.contextmanager
def start(plan: Plan, output: Output) -> Iterator[Sequence[Worker]]:
    """Starts the workers; none is left when the context ends, whatever ends it.

    Raises:
      UserError: Horovod is not installed.
    """
    with serve_rendezvous(HOST, listens_on=HOST) as assign_variables:
        defaults = {name: value for name, value in DEFAULTS.items() if name not in plan.environment}
        own = {index: defaults | each for index, each in enumerate(assign_variables([HOST] * len(plan.places)))}
        with start_each(plan, output, own) as workers:
            yield workers
