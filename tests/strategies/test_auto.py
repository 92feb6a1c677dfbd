"""What `auto` picks, and that it says why. Devices that are not here are faked; nothing is connected."""

from __future__ import annotations

import json
import os

import pytest
import tensorflow as tf
from support import CLUSTER_VARIABLES

from tfdist.errors import UserError
from tfdist.strategies.auto import choose
from tfdist.strategies.mirrored import Mirrored

TF_CONFIG = json.dumps({"cluster": {"worker": ["host0:2222"]}, "task": {"type": "worker", "index": 0}})


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(CLUSTER_VARIABLES)]:
        monkeypatch.delenv(name)


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
        ({"OMPI_COMM_WORLD_RANK": "0"}, {}, "horovod", "OMPI_COMM_WORLD_RANK is set"),
        ({"TF_CONFIG": TF_CONFIG}, {}, "multi_worker", "TF_CONFIG is set"),
        ({"TF_CONFIG": TF_CONFIG}, {"GPU": 4}, "multi_worker", "TF_CONFIG is set"),
        ({"TF_CONFIG": TF_CONFIG, "HOROVOD_RANK": "0"}, {"TPU": 8}, "multi_worker", "TF_CONFIG is set"),
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


def test_a_wrong_tf_config_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}}')
    with pytest.raises(UserError, match="TF_CONFIG"):
        choose()


def test_a_strategy_in_the_place_of_what_makes_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"auto\.choose\.mirrored is .*without parentheses"):
        choose(mirrored=Mirrored(num_cpu_devices=2))
