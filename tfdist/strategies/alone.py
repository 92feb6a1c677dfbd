"""Refuses to train alone what was started as one of several processes.

Invariant: no run is opened with a strategy of one process, or with a Horovod that found nobody, where the environment
names other workers: each of them would train the whole experiment by itself, into the same run directory.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.errors import UserError
from tfdist.strategies.cluster import environment
from tfdist.strategies.cluster.tf_config import VARIABLE as TF_CONFIG
from tfdist.strategies.cluster.tf_config import read_tf_config

_HOROVOD_START = (
    "Start it with `python -m tfdist.launch --workers=2 --launcher=horovod -- --gin_file=…` or "
    "`horovodrun -np 2 python -m tfdist.main --gin_file=…`; for one worker on purpose, write 1 there."
)
_TOGETHER = {
    TF_CONFIG: "train.strategy = @multi_worker.MultiWorker() (--gin_file=configs/strategies/multi_worker.gin)",
    environment.SLURM_TASKS: "a job like examples/clusters/slurm.sbatch: it gives each task its TF_CONFIG",
}
_BY_HOROVOD = "train.strategy = @horovod.Horovod() (--gin_file=configs/strategies/horovod.gin)"


def refuse_others(strategy: str, variables: Mapping[str, str]) -> None:
    """Raises UserError where this process is one of several, and the strategy found or finds none of them."""
    cluster = read_tf_config(variables)
    counts = {TF_CONFIG: str(cluster.num_workers)} if cluster is not None else {}
    counts |= {name: variables.get(name, "") for name in (*environment.HOROVOD_SIZES, environment.SLURM_TASKS)}
    for name, count in counts.items():
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                f"The strategy {strategy} trains in one process here, and {name} says that this is one of {count}: "
                "each of them would train by itself, into the same run directory. To train together, use "
                f"{_TOGETHER.get(name, _BY_HOROVOD)}. To train in this process alone on purpose, take the variable "
                f"away: env -u {name} python -m tfdist.main …"
            )


def refuse_without_horovodrun(variables: Mapping[str, str]) -> None:
    """Raises UserError where nothing has started this process as a worker of Horovod's."""
    if environment.first_set(environment.HOROVOD_MARKS, variables) is None:
        raise UserError(
            "The strategy horovod was chosen, and horovodrun has not started this process (none of "
            f"{', '.join(environment.HOROVOD_MARKS)} is set): it would train alone. {_HOROVOD_START}"
        )
