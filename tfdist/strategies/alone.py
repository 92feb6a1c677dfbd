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
    "`python -m tfdist.launch --workers=2 --launcher=horovod -- --gin_file=…` or "
    "`horovodrun -np 2 python -m tfdist.main --gin_file=…`."
)
_TOGETHER = {
    TF_CONFIG: "train.strategy = @multi_worker.MultiWorker() (--gin_file=configs/strategies/multi_worker.gin)",
    environment.SLURM_TASKS: "a job like examples/clusters/slurm.sbatch: it gives each task its TF_CONFIG",
}
_BY_HOROVOD = "train.strategy = @horovod.Horovod() (--gin_file=configs/strategies/horovod.gin)"


def other_workers(variables: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable that says so, and how many processes this is one of; None where it is the only one.

    Raises:
      UserError: TF_CONFIG is wrong.
    """
    cluster = read_tf_config(variables)
    if cluster is not None and cluster.num_workers > 1:
        return TF_CONFIG, cluster.num_workers
    for name in (*environment.HOROVOD_SIZES, environment.SLURM_TASKS):
        text = variables.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return name, int(text)
    return None


def refuse_others(strategy: str, variables: Mapping[str, str]) -> None:
    """Raises UserError where this process is one of several, whose strategy is of one process."""
    found = other_workers(variables)
    if found is None:
        return
    name, count = found
    raise UserError(
        f"The strategy {strategy} trains in one process, and {name} says that this is one of {count}: each of them "
        f"would train by itself, into the same run directory. To train together, use "
        f"{_TOGETHER.get(name, _BY_HOROVOD)}. To train in this process alone on purpose, take the variable away: "
        f"env -u {name} python -m tfdist.main …"
    )


def refuse_without_horovodrun(variables: Mapping[str, str]) -> None:
    """Raises UserError where nothing has started this process as a worker of Horovod's."""
    if environment.first_set(environment.HOROVOD_MARKS, variables) is None:
        raise UserError(
            "The strategy horovod was chosen, and horovodrun has not started this process (none of "
            f"{', '.join(environment.HOROVOD_MARKS)} is set): it would train alone. Start it with {_HOROVOD_START} "
            "For one worker on purpose, write --workers=1, or -np 1."
        )


def refuse_unmet(size: int, variables: Mapping[str, str]) -> None:
    """Raises UserError where Horovod has found nobody (`size` 1) although this process is one of several."""
    found = other_workers(variables)
    if size > 1 or found is None:
        return
    raise UserError(
        f"Horovod found no other worker, and {found[0]} says that this is one of {found[1]} processes: each of them "
        f"would train alone. Start them with {_HOROVOD_START} To train in this process alone on purpose, take the "
        f"variable away: env -u {found[0]}"
    )
