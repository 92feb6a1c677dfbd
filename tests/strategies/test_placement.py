"""Where a step computes, with a second logical device of the CPU in an accelerator's place, and how workers reduce."""

from __future__ import annotations

import json
import pathlib
import textwrap
from typing import Any
from unittest import mock

import pytest
import support
import tensorflow as tf

from tfdist.strategies.cluster.environment import PROXY_VARIABLES
from tfdist.telemetry.account import sampler

# Trains under OneDeviceStrategy on the second device, and on both, and tells by device the operations of the step's
# graph, and on which devices variables lie. At last it takes a batch where the second device is a GPU.
PROGRAM = """
    import dataclasses, json, keras, tempfile
    import tensorflow as tf
    from tensorflow.python.eager import context

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    from tfdist.keras_patches.patches import Patches
    from tfdist.strategies.auto import wrap_strategy
    from tfdist.strategies.one_device import OneDevice
    from tfdist.telemetry.console.progress_bar import open_console
    from tfdist.training.loop.boundaries import Vote
    from tfdist.training.run import assembly
    from tfdist.training.run.request import Request
    from tfdist.training.run.run import open_run
    from tpu_compiler.test_program import settings

    def train(distribution, **changes):
        strategy = wrap_strategy(distribution)
        own = dataclasses.replace(settings(strategy), **changes)
        with tempfile.TemporaryDirectory() as run_dir:
            request = Request(run_dir, console=lambda is_chief: open_console(is_chief=False), keeps=False)
            with open_run(request, strategy, mode="train") as run:
                training = assembly.assemble(run, own, own.model, Patches())
                step = assembly.build_step(training)
                iterator = assembly.stream(run, training.source, training.plan)
                context.context().enable_graph_collection()
                step.run(iterator, tf.constant(0, tf.int64), tf.constant(3), Vote().tensor(), tf.zeros([3], tf.float64))
        learner = training.learner
        variables = [*learner.model.variables, *learner.optimizer.variables, *learner.train_metrics.variables]
        found = {"variables": sorted({v.value.device[-5:] for v in variables}), "operations": {}, "constants": 0}
        found["slots"] = [v.value.device[-5:] for v in learner.optimizer.variables if v.value.shape.rank]
        for function in context.export_run_metadata().function_graphs:
            is_step = any(node.op == "LoopCond" for graph in function.partition_graphs for node in graph.node)
            for graph in function.partition_graphs if is_step else ():
                kinds = found["operations"].setdefault(graph.node[0].device[-5:], [])
                kinds.extend(sorted({node.op for node in graph.node}))
                if graph.node[0].device.endswith("CPU:0"):
                    shapes = [node.attr["value"].tensor.tensor_shape for node in graph.node if node.op == "Const"]
                    found["constants"] = max([found["constants"], *(len(shape.dim) for shape in shapes)])
        return found

    def take_ahead():
        strategy = OneDevice("CPU")
        strategy.connect()
        real = tf.config.list_logical_devices
        tf.config.list_logical_devices = lambda kind=None: real("CPU")[1:] if kind == "GPU" else real(kind)
        iterator = strategy.distribute(lambda topology: tf.data.Dataset.range(5).repeat())
        read = tf.function(lambda i: tf.add_n([next(i), next(i)]))
        return [next(iterator).device[-5:], int(read(iterator))]

    one, both, second = tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy, "/device:CPU:1"
    by_adam = {"optimizer": lambda: keras.optimizers.Adam()}
    found = {
        "plain": train(one(second)),
        "host": train(one(second), sharding="host", **by_adam),
        "optimizer": train(both(["/device:CPU:0", second]), sharding="optimizer", **by_adam),
        "ahead": take_ahead(),
    }
    print("found", json.dumps(found))
"""
# What the host may do: loops and conditions, and arithmetic on numbers of the step.
CONTROL = {"Enter", "Exit", "Identity", "LoopCond", "Merge", "NextIteration", "NoOp", "Switch", "_Arg", "_Retval"}
TRANSFERS = {"_Recv", "_Send", "_HostRecv", "_HostSend"}
NUMBERS = {
    *("AddV2", "Cast", "Const", "Equal", "FloorMod", "Less", "LogicalAnd", "LogicalNot", "Mul", "SelectV2", "Sub"),
    *("EnsureShape", "Pack", "Timestamp", "Unpack"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `PROGRAM` has found."""
    done = support.run_python(["-c", textwrap.dedent(PROGRAM)], env=support.TESTS_PATH).check()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.mark.slow
def test_a_step_computes_where_its_variables_are_and_the_host_counts(found: dict[str, Any]) -> None:
    plain = found["plain"]
    assert plain["variables"] == ["CPU:1"]
    assert sorted(plain["operations"]) == ["CPU:0", "CPU:1"]
    assert set(plain["operations"]["CPU:0"]) <= CONTROL | TRANSFERS | NUMBERS
    assert plain["constants"] <= 1  # the host's are numbers
    assert {"IteratorGetNext", "ReadVariableOp", "AssignVariableOp"} <= set(plain["operations"]["CPU:1"])


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "owners"), [("host", {"CPU:0"}), ("optimizer", {"CPU:0", "CPU:1"})])
def test_slots_are_where_their_owner_is_and_updated_there(
    found: dict[str, Any], sharding: str, owners: set[str]
) -> None:
    sharded = found[sharding]
    assert set(sharded["slots"]) == owners
    assert {device for device, kinds in sharded["operations"].items() if "Sqrt" in kinds} == owners  # second moments
    if sharding == "host":
        assert sharded["variables"] == ["CPU:0", "CPU:1"] and "MatMul" not in sharded["operations"]["CPU:0"]


@pytest.mark.slow
def test_batches_of_one_device_wait_in_its_memory(found: dict[str, Any]) -> None:
    assert found["ahead"] == ["CPU:1", 3]


ALL_REDUCED = {
    "digits": ["train.precision = 'float16'", "train.steps_per_call = 3"],
    "digits_contrastive": [],  # gathers rows
}


PROXIES = {**dict.fromkeys(PROXY_VARIABLES, "http://127.0.0.1:9"), "no_proxy": "", "NO_PROXY": ""}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ALL_REDUCED)
def test_no_all_reduce_is_of_int32_and_none_goes_through_a_proxy(experiment: str, tmp_path: pathlib.Path) -> None:
    params = [f"--gin_param={text}" for text in ("train.epochs = 2", *ALL_REDUCED[experiment])]
    flags = [f"--gin_file=tfdist:experiments/{experiment}.gin", f"--run_dir={tmp_path}", *params]
    support.run_module("strategies.as_on_gpus", *flags, launch=("--workers=2",), env=PROXIES).check()
    assert (tmp_path / "export" / "model.keras").exists()
    assert json.loads((tmp_path / "result.json").read_text())["hardware"]["devices"] == {"CPU": 1}  # not the other's


def test_memory_is_that_of_the_process_s_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster TensorFlow lists the GPUs of all workers."""
    workers = [f"/job:worker/replica:0/task:{worker}/device:" for worker in range(2)]
    devices = [mock.Mock() for _ in range(4)]
    for device, name in zip(
        devices, [f"{worker}{kind}:0" for kind in ("CPU", "GPU") for worker in workers], strict=True
    ):
        device.name = name
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: devices)
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", {"GPU:0": {"current": 7, "peak": 9}}.__getitem__)
    assert sampler.device_memory_bytes() == 7.0
    assert sampler.device_memory_bytes("peak") == 9.0
