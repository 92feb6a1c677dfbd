"""The strategy tpu: for real up to the call that needs a TPU, and behind it with two CPU devices in a TPU's place."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from mistakes import each_is_refused
from processes import Running
from support import REPOSITORY, Finished, free_ports, run_python

from tfdist.data.batches import BatchPlan
from tfdist.data.sources.indexed import IndexedSource
from tfdist.errors import UserError
from tfdist.strategies.tpu import TPU
from tfdist.training.run.assembly import stream

# A TensorFlow server that has no TPU, in the place of a TPU's host.
HOST = """
    import sys, time
    import tensorflow as tf

    index, *addresses = sys.argv[1:]
    tf.distribute.Server({"worker": addresses}, job_name="worker", task_index=int(index))
    print("up", flush=True)
    time.sleep(300)
"""

# What stands in for the hardware: the initialization does nothing, and the strategy's cores are two CPU devices.
CPUS_FOR_A_TPU = """
    import sys
    import tensorflow as tf
    from tfdist import main
    from tfdist.strategies import mirrored

    def listed(kind=None, real=tf.config.list_physical_devices):
        return ["a TPU"] if kind == "TPU" else real(kind)

    def strategy(resolver):
        made = tf.distribute.MirroredStrategy(cores)
        type(made.extended).num_hosts = 1
        return made

    cores = mirrored.split_cpu(2)
    tf.config.list_physical_devices = listed
    tf.tpu.experimental.initialize_tpu_system = lambda resolver: None
    tf.distribute.TPUStrategy = strategy
    sys.exit(main.main(sys.argv[1:]))
"""
# What stands in for a slice of two hosts: two TensorFlow servers, each with one core, its CPU. What a host of a TPU is
# to read is made on the host's own server.
TWO_HOSTS = """
    import sys
    import tensorflow as tf
    from tensorflow.python.distribute import input_lib, input_util, mirrored_strategy
    from tfdist import main

    addresses = sys.argv[1:3]
    cores = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)]

    class Extended(mirrored_strategy.MirroredExtended):
        num_hosts = 2

        def _experimental_distribute_datasets_from_function(self, dataset_fn, options):
            workers = input_lib.InputWorkers([(core, (core,)) for core in cores])
            contexts = [tf.distribute.InputContext(2, i, 2) for i in range(2)]
            strategy = self._container_strategy()
            return input_util.get_distributed_datasets_from_function(dataset_fn, workers, contexts, strategy, options)

    class Slice(tf.distribute.Strategy):
        _collective_key_base = 0

        def __init__(self, resolver):
            super().__init__(Extended(self, cores, tf.distribute.ReductionToOneDevice()))

    class Resolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
        def __init__(self, tpu, zone, project):
            super().__init__(tf.train.ClusterSpec({"worker": addresses}), master=addresses[0], rpc_layer="grpc")

    mirrored_strategy._is_device_list_single_worker = lambda devices: True
    tf.distribute.cluster_resolver.TPUClusterResolver = Resolver
    tf.tpu.experimental.initialize_tpu_system = lambda resolver: None
    tf.distribute.TPUStrategy = Slice
    sys.exit(main.main(sys.argv[3:]))
"""
DIGITS_ON_TPU = ["--gin_file=configs/experiments/digits.gin", "--gin_file=configs/strategies/tpu.gin"]


def run_program(text: str, arguments: list[str], cwd: Path) -> Finished:
    return run_python(["-c", textwrap.dedent(text), *arguments], cwd=cwd)


@contextlib.contextmanager
def hosts(count: int, logs: Path) -> Iterator[list[str]]:
    """The addresses of servers that have no TPU."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    with contextlib.ExitStack() as stack:
        for index in range(count):
            command = [sys.executable, "-c", textwrap.dedent(HOST), str(index), *addresses]
            server = stack.enter_context(Running(command, logs / f"host-{index}.log"))
            server.until(lambda server=server: "up" in server.output)
        yield addresses


@pytest.fixture(autouse=True)
def _no_tpu_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"):
        monkeypatch.delenv(name, raising=False)


test_without_a_tpu_the_user_is_told_what_to_write = each_is_refused(
    lambda address: TPU(address).connect(),
    (None, r"address = None.*Please provide a TPU Name.*tpu.TPU.address = 'local'"),
    ("local", r"address = 'local': TensorFlow lists no TPU device.*tfdist\[tpu\]"),
    ("grpc://127.0.0.1:1", r"'grpc://127.0.0.1:1': 127.0.0.1:1 does not answer \(Connection refused\)"),
)


def test_a_tpu_of_this_machine_is_local_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["a TPU"] if kind == "TPU" else [])
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda resolver: asked.append(resolver._tpu))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda resolver: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TPU().connect()
    assert asked == ["local"]
    with pytest.raises(UserError, match="does not answer"):
        TPU("grpc://127.0.0.1:1").connect()


@pytest.mark.slow
def test_a_host_that_answers_without_a_tpu_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    with hosts(1, tmp_path) as (address,):
        named = f"--gin_param=tpu.TPU.address = 'grpc://{address}'"
        told = run_python(["-m", "tfdist.main", *DIGITS_ON_TPU, named, "--run_dir=run"], cwd=tmp_path)
    assert told.status == 2 and "Traceback" not in told.stderr, told.outputs()
    assert f"error: The TPU 'grpc://{address}' does not initialize: TPUs not found in the cluster" in told.stderr


@pytest.mark.slow
def test_behind_the_hardware_the_digits_train_in_bfloat16_on_padded_batches_that_xla_compiles(tmp_path: Path) -> None:
    settings = ["train.precision = 'bfloat16'", "train.xla = 'on'", "train.epochs = 3"]
    arguments = [*DIGITS_ON_TPU, *(f"--gin_param={setting}" for setting in settings), "--run_dir=run"]
    told = run_program(CPUS_FOR_A_TPU, arguments, tmp_path).check()
    assert "TPU 'local': 2 cores" in told.stdout
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["strategy"], result["num_replicas"]) == ("tpu", 2)
    assert result["examples_seen"] == 3 * 1437  # the padding is not counted
    assert result["eval_metrics"]["accuracy"] > 0.8


def points(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_each_host_of_a_slice_reads_its_own_part_of_a_table(tmp_path: Path) -> None:
    run_python([REPOSITORY / "examples/files" / "prepare_tables.py"], cwd=tmp_path).check()
    iris = ["--gin_file=tfdist:experiments/iris_csv.gin", "--gin_param=train.epochs = 3"]
    on_slice = ["--gin_file=tfdist:strategies/tpu.gin", "--gin_param=tpu.TPU.address = 'slice'", "--run_dir=hosts"]
    with hosts(2, tmp_path) as addresses:
        told = run_program(TWO_HOSTS, [*addresses, *iris, *on_slice], tmp_path).check()
    assert "TPU 'slice': 2 cores on 2 hosts" in told.stdout
    run_python(["-m", "tfdist.main", *iris, "--run_dir=alone"], cwd=tmp_path).check()
    found, expected = points(tmp_path / "hosts"), points(tmp_path / "alone")
    assert len(found) == len(expected) > 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


def test_what_python_reads_is_refused_on_several_hosts() -> None:
    on_slice: Any = SimpleNamespace(strategy=SimpleNamespace(num_hosts=2))
    source = IndexedSource([(np.zeros(3), 1), (np.ones(3), 0)])
    with pytest.raises(UserError, match="reads by Python code, which runs on the first of the 2 hosts of this TPU"):
        stream(on_slice, source, BatchPlan(num_examples=2, global_batch_size=2, num_replicas=2))
