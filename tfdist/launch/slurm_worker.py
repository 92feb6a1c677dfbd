"""`srun … python -m tfdist.launch.slurm_worker --hosts=a,b --port=P -- ARGUMENTS`: one task of a Slurm job as a worker.

Sets TF_CONFIG from the job's hosts and this task's number and becomes `python -m tfdist.main ARGUMENTS`, under the same
process number, so that Slurm's signals reach the training. Worker i listens at port P + i. A job of one task gets no
TF_CONFIG: it trains on the devices of its machine.

Invariant: imports no TensorFlow; what Slurm did not say, or said otherwise than the hosts, is a message and status 2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tfdist import command_line
from tfdist.command_line import exit_status_of, flags, split_at_dashes
from tfdist.errors import UserError
from tfdist.launch.local import tf_config

EXAMPLE = "srun python -m tfdist.launch.slurm_worker --hosts=node1,node2 --port=20000 -- --gin_file=…"


FLAGS = flags.FlagValues()
flags.DEFINE_list("hosts", None, "of the job, one a task", flag_values=FLAGS, required=True)
flags.DEFINE_integer(
    "port", None, "of the first worker", lower_bound=1, upper_bound=65535, flag_values=FLAGS, required=True
)
flags.DEFINE_string("module", "tfdist.main", "what to become, such as tfdist.doctor", flag_values=FLAGS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Becomes the worker; returns only the status of arguments that are wrong."""
    return exit_status_of(lambda: become(sys.argv[1:] if arguments is None else arguments))


def become(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the command; raises UserError as `prepare` does."""
    command, variables = prepare(arguments, os.environ)
    os.execve(command[0], command, {**os.environ, **variables})


def prepare(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command to become, and the variables to set for it.

    Raises:
      UserError: this is no task of a Slurm job, or the job has another number of tasks than there are hosts.
    """
    ours, workers_own = split_at_dashes(arguments)
    options = command_line.parse(FLAGS, ours, about=__doc__, hint=f"Write, for example: {EXAMPLE}")
    command = [sys.executable, "-m", options.module, *workers_own]
    hosts = [host for host in options.hosts if host]
    index, num_tasks = _number("SLURM_PROCID", environment), _number("SLURM_NTASKS", environment)
    if num_tasks != len(hosts):
        raise UserError(
            f"The job has {num_tasks} tasks on {len(hosts)} hosts ({','.join(hosts)}); a worker is one task with a "
            "host of its own. Submit it with --ntasks-per-node=1, as examples/clusters/slurm.sbatch does."
        )
    variables = {"PYTHONUNBUFFERED": "1"}
    if num_tasks > 1:
        variables["TF_CONFIG"] = tf_config([f"{host}:{options.port + i}" for i, host in enumerate(hosts)], index)
    return command, variables


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not re.fullmatch("[0-9]+", text):
        raise UserError(f"{name} is {text!r}: this is no task of a Slurm job. Run it so: {EXAMPLE}")
    return int(text)


if __name__ == "__main__":
    command_line.start(main)
