"""Which part a process has in a sweep over a cluster, and what is said where the variables do not tell it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tfdist.errors import UserError
from tfdist.tuning.cluster.role import find_role

SECRET = {"TFDIST_SWEEP_SECRET": "0123456789abcdef"}


def kerastuner(identity: str = "chief", **others: str) -> dict[str, str]:
    given = {"TUNER_ID": identity, "ORACLE_IP": "10.0.0.1", "ORACLE_PORT": "8000", **others}
    return {f"KERASTUNER_{name}": value for name, value in given.items()} | SECRET


def tf_config(task: str, index: int, **cluster: Any) -> dict[str, str]:
    cluster = cluster or {"worker": ["a:1", "b:2"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})} | SECRET


@pytest.mark.parametrize(
    ("variables", "address", "is_chief", "trains"),
    [
        (kerastuner(), "10.0.0.1:8000", True, False),
        (kerastuner("tuner0"), "10.0.0.1:8000", False, True),
        (kerastuner(ORACLE_IP=""), "127.0.0.1:8000", True, False),
        (kerastuner(ORACLE_IP="::1"), "[::1]:8000", True, False),
        (tf_config("worker", 0), "a:1", True, True),
        (tf_config("worker", 1), "a:1", False, True),
        (tf_config("chief", 0, chief=["c:3"], worker=["a:1"]), "c:3", True, True),
        (tf_config("worker", 0, chief=["c:3"], worker=["a:1"]), "c:3", False, True),
        (kerastuner() | tf_config("worker", 0, worker=["a:1"]), "10.0.0.1:8000", True, False),
    ],
)
def test_the_variables_tell_the_part(variables: dict[str, str], address: str, is_chief: bool, trains: bool) -> None:
    role = find_role(variables)
    assert (role.address, role.is_chief, role.trains) == (address, is_chief, trains)


@pytest.mark.parametrize("variables", [{}, {"KERASTUNER_TUNER_ID": ""}, tf_config("worker", 0, worker=["a:1"])])
def test_who_is_alone_has_none(variables: dict[str, str]) -> None:
    assert find_role(variables) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"KERASTUNER_ORACLE_IP": "10.0.0.1"}, "KERASTUNER_TUNER_ID and KERASTUNER_ORACLE_PORT are not set"),
        (kerastuner(ORACLE_PORT=""), "KERASTUNER_ORACLE_PORT is not set"),
        (kerastuner(ORACLE_PORT="https"), "the port 'https' is not a number"),
        (kerastuner(ORACLE_PORT="70000"), "not between 1 and 65535"),
        (kerastuner(ORACLE_IP="http://a"), "it is not a URL"),
        (kerastuner() | tf_config("worker", 0), "KERASTUNER_TUNER_ID and TF_CONFIG are both set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "tune.workers_per_trial"),
        (kerastuner() | {"TFDIST_SWEEP_SECRET": ""}, "there is no secret. Make one with: python -c"),
        (kerastuner(ORACLE_IP="0.0.0.0") | {"TFDIST_SWEEP_SECRET": ""}, "there is no secret"),
        (tf_config("worker", 0) | {"TFDIST_SWEEP_SECRET": ""}, "reached at a:1 (TF_CONFIG)"),
        (kerastuner() | {"TFDIST_SWEEP_SECRET": "short"}, "holds 5 characters; a sweep's secret has at least 16"),
        (kerastuner() | {"TFDIST_SWEEP_SECRET_FILE": "x"}, "_SECRET and TFDIST_SWEEP_SECRET_FILE are both set"),
    ],
)
def test_what_the_variables_do_not_tell_is_said(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError) as raised:
        find_role(variables)
    assert expected in str(raised.value)


def test_a_secret_comes_from_a_file_and_is_not_shown(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "secret"
    given = kerastuner() | {"TFDIST_SWEEP_SECRET": "", "TFDIST_SWEEP_SECRET_FILE": str(file)}
    with pytest.raises(UserError, match=r"cannot be read: TFDIST_SWEEP_SECRET_FILE = .*/secret'"):
        find_role(given)
    file.write_text("0123456789abcdef0123456789abcdef\n")
    role = find_role(given)
    assert role.secret == b"0123456789abcdef0123456789abcdef" and "0123456789" not in repr(role)


@pytest.mark.parametrize("host", ["", "127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_on_one_machine_none_is_needed(host: str) -> None:
    assert find_role(kerastuner(ORACLE_IP=host) | {"TFDIST_SWEEP_SECRET": ""}).secret == b""
