"""TF_CONFIG as a user would write it, rightly and wrongly."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tfdist.errors import UserError
from tfdist.strategies.cluster.tf_config import read_tf_config, split_address

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


def test_workers_are_counted_in_the_order_of_the_cluster() -> None:
    cluster = read({"cluster": TWO, "task": {"type": "worker", "index": 1}})
    assert cluster.workers == ("host0:2222", "host1:2222")
    assert (cluster.worker_index, cluster.num_workers, cluster.is_chief) == (1, 2, False)
    assert cluster.address == "host1:2222"
    assert cluster.jobs == TWO


def test_a_chief_task_is_worker_zero_in_front_of_the_others() -> None:
    jobs = {"worker": ["a:1", "b:1"], "chief": ["c:1"]}
    chief = read({"cluster": jobs, "task": {"type": "chief", "index": 0}})
    second = read({"cluster": jobs, "task": {"type": "worker", "index": 1}})
    assert chief.workers == second.workers == ("c:1", "a:1", "b:1")
    assert (chief.worker_index, chief.is_chief) == (0, True)
    assert (second.worker_index, second.task_index, second.is_chief) == (2, 1, False)
    assert second.jobs == jobs
    assert [second.task_name(i) for i in range(2)] == ["worker 0 (the chief)", "worker 1 (task worker 0)"]


def test_an_index_may_be_a_string_of_digits_and_other_keys_are_let_be() -> None:
    cluster = read({"cluster": TWO, "task": {"type": "worker", "index": "1"}, "environment": "cloud"})
    assert cluster.worker_index == 1


@pytest.mark.parametrize("address", ["10.0.0.1:2222", "localhost:1", "[::1]:65535", "a-b.c_d.example.:80"])
def test_addresses_of_every_kind_are_accepted(address: str) -> None:
    assert read({"cluster": {"worker": [address]}, "task": FIRST}).workers == (address,)


def test_an_ipv6_host_loses_its_brackets_when_split() -> None:
    assert split_address("[::1]:22") == ("::1", 22)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{'cluster': {}}", "not JSON.*column 2.*double quotes"),
        ('{"cluster": {"worker": ["a:1"]},\n "task": }', "not JSON.*line 2, column 10"),
        ("[1]", "must be a JSON object.*not a list"),
        ({"clusters": TWO, "task": FIRST}, "no 'cluster'. Is 'clusters' meant to be 'cluster'"),
        ({"cluster": ["a:1"], "task": FIRST}, "'cluster' must be an object.*not a list"),
        ({"cluster": {}, "task": FIRST}, "'cluster' names no worker"),
        ({"cluster": {"worker": []}, "task": FIRST}, "'cluster' names no worker"),
        ({"cluster": {"worker": "a:1"}, "task": FIRST}, r'worker must be a list.*"a:1".*\["a:1"\]'),
        ({"cluster": {"worker": [1]}, "task": FIRST}, "worker must be a list.*strings.*Received: .1"),
        ({"cluster": {"wroker": ["a:1"]}, "task": FIRST}, "cluster.wroker: there is no such job.*mean 'worker'"),
        ({"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": FIRST}, "parameter servers are not supported"),
        ({"cluster": {"worker": ["a:1"], "evaluator": ["b:1"]}, "task": FIRST}, "evaluates on all workers; leave"),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": FIRST}, "chief has 2 addresses; there can be one"),
        ({"cluster": TWO}, "has no 'task'"),
        ({"cluster": TWO, "tasks": FIRST}, "Is 'tasks' meant to be 'task'"),
        ({"cluster": TWO, "task": 0}, "'task' must be an object.*not a number"),
        ({"cluster": TWO, "task": {"index": 0}}, "task.type is missing"),
        ({"cluster": TWO, "task": {"type": "worker", "idx": 0}}, "task.index is missing"),
        ({"cluster": TWO, "task": {"type": "Worker", "index": 0}}, "none of the cluster's jobs, 'worker'.*'worker'"),
        ({"cluster": TWO, "task": {"type": "chief", "index": 0}}, "none of the cluster's jobs"),
        ({"cluster": TWO, "task": {"type": "evaluator", "index": 0}}, "do not start an evaluator"),
        ({"cluster": TWO, "task": {"type": 1, "index": 0}}, "none of the cluster's jobs"),
        ({"cluster": TWO, "task": {"type": "worker", "index": "one"}}, "whole number.*Received: .one"),
        ({"cluster": TWO, "task": {"type": "worker", "index": True}}, "whole number.*Received: true"),
        ({"cluster": TWO, "task": {"type": "worker", "index": 1.0}}, "whole number"),
        ({"cluster": TWO, "task": {"type": "worker", "index": 2}}, 'has 2 tasks, so it is from 0 to 1.*"index": 1'),
        ({"cluster": TWO, "task": {"type": "worker", "index": -1}}, "out of range"),
        ({"cluster": TWO, "task": {"type": "worker", "index": "-1"}}, "out of range"),
    ],
)
def test_a_mistake_is_named_with_what_was_received(config: Any, expected: str) -> None:
    message = message_of(config)
    assert re.search(expected, message, re.DOTALL), message
    assert message.startswith("TF_CONFIG") and "Received: " in message


@pytest.mark.parametrize(
    "config",
    [
        "nonsense",
        {"task": FIRST},
        {"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}},
        {"cluster": {"worker": "a:1"}, "task": FIRST},
        {"cluster": {"chief": ["a:1", "b:1"], "worker": ["c:1"]}, "task": {"type": "chief", "index": 1}},
        {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}},
        {"cluster": TWO, "task": {"type": "worker", "index": 7}},
    ],
)
def test_the_example_in_a_message_is_itself_right(config: Any) -> None:
    example = re.search(r"TF_CONFIG='(.*)'$", message_of(config))
    assert example and read(example[1]) is not None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host1", "no port.*'host1:2222'"),
        ("host1:", "port '' is not a number"),
        ("host1:http", "port 'http' is not a number"),
        ("host1:0", "not between 1 and 65535"),
        ("host1:65536", "not between 1 and 65535"),
        ("http://host1:2222/", "not a URL. Write 'host1:2222'"),
        ("grpc://host1:2222", "not a URL. Write 'host1:2222'"),
        ("host1: 2222", "spaces. Write 'host1:2222'"),
        ("", "must not be empty"),
        (":2222", "no host"),
        ("::1:2222", r"brackets. Write '\[::1\]:2222'"),
        ("[::g]:2222", "is not a host name"),
        ("host1/a:2222", "is not a host name"),
        ("a" * 64 + ":2222", "is not a host name"),
    ],
)
def test_a_malformed_address_is_named_by_its_task(address: str, expected: str) -> None:
    message = message_of({"cluster": {"worker": ["host0:2222", address]}, "task": FIRST})
    assert "cluster.worker[1]" in message and f"Received: {address!r}" in message
    assert re.search(expected, message), message


@pytest.mark.slow
def test_two_tasks_with_one_address_are_both_named() -> None:
    message = message_of({"cluster": {"chief": ["Host0:1"], "worker": ["b:1", "host0:1"]}, "task": FIRST})
    assert "cluster.chief[0] and cluster.worker[1] have the same address" in message
