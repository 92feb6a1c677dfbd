"""TF_CONFIG as a user would write it, rightly and wrongly; and a user without a home."""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

import pytest

from tfdist.errors import UserError
from tfdist.strategies.cluster import environment
from tfdist.strategies.cluster.tf_config import read_tf_config
from tfdist.telemetry.run_directory import RunDirectory

TWO = {"worker": ["host0:2222", "host1:2222"]}
FIRST = {"type": "worker", "index": 0}


def read(config: Any) -> Any:
    return read_tf_config({"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)})


def message_of(config: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(config)
    return str(caught.value)


@pytest.mark.parametrize("environment", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "  "}, {"TF_CONFIG": "{}"}])
def test_without_tf_config_there_is_no_cluster(environment: dict[str, str]) -> None:
    assert read_tf_config(environment) is None


def test_a_chief_task_is_worker_zero_in_front_of_the_others() -> None:
    jobs = {"worker": ["a:1", "b:1"], "chief": ["c:1"]}
    chief = read({"cluster": jobs, "task": {"type": "chief", "index": 0}})
    second = read({"cluster": jobs, "task": {"type": "worker", "index": 1}})
    assert chief.workers == second.workers == ("c:1", "a:1", "b:1")
    assert (chief.worker_index, chief.is_chief) == (0, True)
    assert (second.worker_index, second.task_index, second.is_chief) == (2, 1, False)
    assert second.jobs == jobs
    assert [second.task_name(i) for i in range(2)] == ["worker 0 (the chief)", "worker 1 (task worker 0)"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{'cluster': {}}", "not JSON.*double quotes.*column 2"),
        ("[1]", "must have 'cluster'"),
        ({"clusters": TWO, "task": FIRST}, "must have 'cluster'"),
        ({"cluster": ["a:1"], "task": FIRST}, "must have 'cluster'"),
        ({"cluster": {}, "task": FIRST}, "'cluster' names no worker"),
        ({"cluster": {"worker": []}, "task": FIRST}, "'cluster' names no worker"),
        ({"cluster": {"worker": "a:1"}, "task": FIRST}, "worker must be a list.*Received: a:1"),
        ({"cluster": {"worker": [1]}, "task": FIRST}, "worker must be a list.*strings.*Received: .1"),
        ({"cluster": {"wroker": ["a:1"]}, "task": FIRST}, "cluster.wroker: the jobs are.*mean 'worker'"),
        ({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": FIRST}, "There are no parameter servers"),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": FIRST}, "cluster.chief must be one address"),
        ({"cluster": {"chief": ["A:1"], "worker": ["a:1"]}, "task": FIRST}, r"chief.0. and cluster.worker.0. have the"),
        ({"cluster": TWO}, "and 'task'"),
        ({"cluster": TWO, "task": {"type": "worker", "idx": 0}}, "and 'task'"),
        ({"cluster": TWO, "task": {"type": "Worker", "index": 0}}, "none of the cluster's jobs, 'worker'.*'worker'"),
        ({"cluster": TWO, "task": {"type": "chief", "index": 0}}, "none of the cluster's jobs"),
        ({"cluster": TWO, "task": {"type": 1, "index": 0}}, "none of the cluster's jobs"),
        *(({"cluster": TWO, "task": FIRST | {"index": index}}, "from 0 to 1") for index in ("one", True, 1.0, 2, -1)),
    ],
)
def test_a_mistake_is_named_with_what_was_received_and_a_right_example(config: Any, expected: str) -> None:
    message = message_of(config)
    assert re.search(expected, message, re.DOTALL), message
    assert message.startswith("TF_CONFIG") and "Received: " in message
    example = re.search(r"TF_CONFIG='(.*)'$", message)
    assert example and read(example[1]) is not None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host1", "no port.*'host1:2222'"),
        *((f"host1:{port}", f"port '{port}' is not a number between") for port in ("", "http", "0", "65536")),
        ("::1:2222", r"brackets. Write '\[::1\]:2222'"),
        *((host, "is not a host name") for host in ("grpc://host1:2222", "host 1:2222", ":2222", "[::g]:2222")),
        ("a" * 64 + ":2222", "is not a host name"),
    ],
)
def test_a_malformed_address_is_named_by_its_task(address: str, expected: str) -> None:
    message = message_of({"cluster": {"worker": ["host0:2222", address]}, "task": FIRST})
    assert "cluster.worker[1]" in message and f"Received: {address}" in message
    assert re.search(expected, message), message


# A home


def test_a_user_without_a_home_gets_no_directory_of_the_name_of_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and without an entry in passwd
    cache = environment.cache_directory()
    assert os.path.isabs(cache) and cache == environment.cache_directory()
    with pytest.raises(UserError, match="this user has no home"):
        RunDirectory("~/runs/a")
