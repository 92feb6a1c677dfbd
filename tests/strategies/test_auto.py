"""What `auto` picks, and why; and that a process which is one of several does not train by itself.

Devices that are not here are faked; nothing is connected.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies import horovod
from tfdist.strategies.auto import choose, wrap_strategy
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import refuse_others


def tf_config(workers: int) -> dict[str, str]:
    cluster = {"worker": [f"host{index}:2222" for index in range(workers)]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}


ONE = tf_config(1)


@pytest.mark.parametrize(
    ("variables", "devices", "name", "reason"),
    [
        ({}, {}, "one_device", "no GPU, TF_CONFIG, Horovod or TPU was found"),
        ({}, {"GPU": 1}, "one_device", "one GPU was found"),
        ({}, {"GPU": 2}, "mirrored", "2 GPUs were found"),
        ({}, {"TPU": 8}, "tpu", "TensorFlow finds a TPU on this machine"),
        ({"TPU_NAME": "node-1"}, {}, "tpu", "TPU_NAME is set"),
        ({"TPU_WORKER_ID": "0"}, {"GPU": 2}, "tpu", "TPU_WORKER_ID is set"),
        ({"HOROVOD_RANK": "1"}, {"GPU": 2}, "horovod", "HOROVOD_RANK is set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, {"GPU": 2}, "mirrored", "2 GPUs were found"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, {}, "horovod", "OMPI_COMM_WORLD_RANK is set"),
        (ONE, {}, "multi_worker", "TF_CONFIG is set"),
        (ONE, {"GPU": 4}, "multi_worker", "TF_CONFIG is set"),
        ({**ONE, "HOROVOD_RANK": "0"}, {"TPU": 8}, "multi_worker", "TF_CONFIG is set"),
        ({"HOROVOD_RANK": "0", "TPU_NAME": "node-1"}, {}, "horovod", "HOROVOD_RANK is set"),
        ({"TF_CONFIG": "{}"}, {}, "one_device", "no GPU"),
        ({"TF_CONFIG": " ", "TPU_NAME": "", "HOROVOD_RANK": ""}, {}, "one_device", "no GPU"),
    ],
)
def test_the_strategy_fits_what_is_found_and_says_what_that_was(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: dict[str, int], name: str, reason: str
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["device"] * devices.get(kind, 0))
    chosen = choose()
    assert chosen.name == name
    assert chosen.reason.startswith("auto: ") and reason in chosen.reason


def test_the_chosen_strategy_is_made_as_the_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["device"] * 2 * (kind == "GPU"))
    assert choose(mirrored=lambda: Mirrored(num_cpu_devices=3)).expected_replicas() == 3


def test_a_strategy_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="in the scope of a Strategy, which tfdist does not train under"):
        wrap_strategy(object.__new__(tf.distribute.Strategy))


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
    assert together in str(raised.value) and f"env -u {decisive} tfdist" in str(raised.value)


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
    expected = (
        r"horovod trains in one process here, and PMI_SIZE says .* one of 2.* use tfdist launch --launcher=horovod"
    )
    with pytest.raises(UserError, match=expected):
        horovod.Horovod().connect()
