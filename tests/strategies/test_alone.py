"""A process that was started as one of several does not train by itself."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
from support import CLUSTER_VARIABLES

from tfdist.errors import UserError
from tfdist.strategies import horovod
from tfdist.strategies.auto import choose
from tfdist.strategies.base import refuse_others
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice


def tf_config(workers: int) -> dict[str, str]:
    cluster = {"worker": [f"host{index}:2222" for index in range(workers)]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(CLUSTER_VARIABLES)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "together"),
    [
        (tf_config(2), "multi_worker.gin"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovod.gin"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "horovod.gin"),
        ({"PMI_SIZE": "2"}, "horovod.gin"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "slurm.sbatch"),
    ],
)
@pytest.mark.parametrize("strategy", [OneDevice, lambda: Mirrored(num_cpu_devices=2)])
def test_a_strategy_of_one_process_is_refused_in_one_of_several(
    monkeypatch: pytest.MonkeyPatch, strategy: type[OneDevice], variables: dict[str, str], together: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="trains in one process") as raised:
        strategy().check_alone()
    decisive = next(iter(name for name in variables if "RANK" not in name))
    assert f"{decisive} says that this is one of 2" in str(raised.value)
    assert together in str(raised.value) and f"env -u {decisive} python" in str(raised.value)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        tf_config(1),
        {"HOROVOD_SIZE": "1"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_of_one_is_as_good_as_alone(variables: dict[str, str]) -> None:
    refuse_others("mirrored", variables)


def test_what_auto_finds_in_a_task_of_slurms_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match="SLURM_STEP_NUM_TASKS says that this is one of 4"):
        choose().check_alone()


def test_horovod_without_horovodrun_is_refused_with_what_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "import_horovod", lambda: SimpleNamespace(init=pytest.fail))
    with pytest.raises(UserError, match=r"horovodrun has not started this process") as raised:
        horovod.Horovod().connect()
    assert "--launcher=horovod" in str(raised.value) and "on purpose, write 1 there" in str(raised.value)


def test_horovod_that_meets_nobody_among_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under srun, with a Horovod that was built without MPI."""
    nobody = SimpleNamespace(init=lambda: None, size=lambda: 1)
    monkeypatch.setattr(horovod, "import_horovod", lambda: nobody)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(UserError, match=r"horovod trains in one process here, and PMI_SIZE says .* one of 2"):
        horovod.Horovod().connect()
