"""Runs whose optimizer's state is spread over the replicas: how much each holds, and what becomes of it.

That it changes no weight is shown in tests/equivalence.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import support
from equivalence.cases import counting_model, deep_convnet_model
from equivalence.runs import assert_close, assert_same_bits, load_weights
from gcs.server import GcsServer
from mistakes import each_is_refused
from training.trainings import run

from tfdist.checkpoint import restore
from tfdist.checkpoint.catalog import list_checkpoints
from tfdist.errors import UserError
from tfdist.keras_patches.patches import Patches
from tfdist.storage import files
from tfdist.strategies.mirrored import Mirrored
from tfdist.training.sharding.sharded_update import build_sharded
from tfdist.training.sharding.shards import LateValues, Shards
from tfdist.training.sharding.tensor_parallel import choose_splits


def trained(directory: pathlib.Path | str, strategy: str, sharding: str, epochs: int, *more: str) -> None:
    started(directory, strategy, sharding, epochs, *more, restarts=5).check()


def started(
    directory: pathlib.Path | str, strategy: str, sharding: str, epochs: int, *more: str, restarts: int = 0
) -> support.Finished:
    launch = support.LAUNCH.get(strategy)
    launch = launch and (*launch, "--backoff_seconds=0.1", f"--max_restarts={restarts}")
    return support.run_module("training.sharded", directory, strategy, sharding, str(epochs), *more, launch=launch)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., pathlib.Path]:
    """The run that nothing befalls, by strategy and sharding. Two replicas end with the same bits wherever they are."""
    root = tmp_path_factory.mktemp("still")

    def run(strategy: str, sharding: str = "none") -> pathlib.Path:
        directory = root / f"{strategy}-{sharding}"
        if not directory.exists():
            trained(directory, strategy, sharding, 4)
        return directory

    return run


MOVES = {
    "owners": [
        ("mirrored4", "optimizer"),
        ("multi_worker", "weights"),
        ("one_device", "none"),
        ("mirrored3", "optimizer"),
    ],
    "slices": [("mirrored4", "tensors"), ("multi_worker", "tensors"), ("one_device", "host"), ("mirrored2", "tensors")],
}


@pytest.mark.slow
@pytest.mark.parametrize("moves", MOVES)
def test_a_run_goes_on_with_any_number_of_replicas(
    tmp_path: pathlib.Path, still: Callable[..., pathlib.Path], moves: str
) -> None:
    """Four replicas, two workers, one device, and two or three replicas."""
    moving, undisturbed = tmp_path / "moving", still("one_device")
    for epochs, (strategy, sharding) in enumerate(MOVES[moves], start=1):
        trained(moving, strategy, sharding, epochs)
    assert_close(load_weights(moving), load_weights(undisturbed), tolerance=1e-5)
    states = []
    for directory in (moving, undisturbed):
        path = list_checkpoints(str(directory / "checkpoints"))[-1].path
        states.append(restore.load(path).tensors)
    assert states[0].keys() == states[1].keys()
    assert_close(states[0].values(), [states[1][name] for name in states[0]], tolerance=1e-5)


@pytest.mark.slow
def test_canonical_replicas_give_the_same_bits_though_kills_change_their_number(
    tmp_path: pathlib.Path, still: Callable[..., pathlib.Path]
) -> None:
    moving = tmp_path / "moving"
    for count, strategy in enumerate(("mirrored4", "multi_worker", "mirrored3", "one_device"), start=1):
        assert started(moving, strategy, "canonical", 4, "killed").status
        assert list_checkpoints(str(moving / "checkpoints"))[-1].step == 4 * count
    trained(moving, "mirrored2", "canonical", 4)
    assert_same_bits(load_weights(moving), load_weights(still("one_device", "canonical")))


@pytest.mark.slow
def test_workers_killed_while_they_save_end_with_the_same_bits(
    tmp_path: pathlib.Path, still: Callable[..., pathlib.Path]
) -> None:
    killed = tmp_path / "killed" / "run"
    trained(killed, "multi_worker", "optimizer", 4, "dies")
    assert {mark.name for mark in killed.parent.glob("died-*")} == {"died-noting", "died-gathering", "died-committed"}
    assert_same_bits(load_weights(killed), load_weights(still("mirrored2")))
    assert all(entry.manifest is not None for entry in list_checkpoints(str(killed / "checkpoints")))
    names = {file.name for file in list_checkpoints(str(killed / "checkpoints"))[-1].manifest.files}  # type: ignore[union-attr]
    assert any(name.startswith("part-00000-") for name in names) and any(
        name.startswith("part-00001-") for name in names
    )


@pytest.mark.slow
@pytest.mark.horovod
def test_workers_write_their_parts_to_a_bucket(
    gcs: GcsServer, tmp_path: pathlib.Path, still: Callable[..., pathlib.Path]
) -> None:
    place = "gs://bucket/runs/sharded"
    trained(place, "horovod", "optimizer", 2)
    (newest,) = [entry for entry in list_checkpoints(f"{place}/checkpoints") if entry.manifest][-1:]
    assert newest.manifest is not None
    assert {file.name[:10] for file in newest.manifest.files} == {"part-00000", "part-00001"}
    trained(place, "mirrored2", "none", 4)
    local = tmp_path / "model.keras"
    local.write_bytes(files.read(f"{place}/export/model.keras"))
    found = keras.models.load_model(local).get_weights()
    assert_same_bits(found, load_weights(still("mirrored2")))


def test_each_replica_holds_its_share() -> None:
    strategy = Mirrored(num_cpu_devices=1)
    strategy.connect()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(8))])
    for count in (2, 3, 4):
        strategy._topology = type(strategy.topology)(0, count, 1)
        shards = Shards(strategy, model.trainable_variables, "optimizer")
        shards.shard_variables()
        sizes = {id(v): int(np.prod(v.shape)) for v in model.trainable_variables}
        shares = [sum(sizes[id(v)] for v in model.trainable_variables if shards.owner(v) == r) for r in range(count)]
        assert sum(shares) == model.count_params() and max(shares) - min(shares) <= max(sizes.values())
        assert sum(int(np.prod(v.shape)) for v in shards.list_own(model.trainable_variables)) == shares[0]


test_a_mistake_is_one_message = each_is_refused(
    lambda settings, tmp_path: run(tmp_path, **settings),
    (
        {"sharding": "weight"},
        "train.sharding is 'weight'; write one of 'optimizer', 'host', 'weights', or a list of patterns",
    ),
    ({"sharding": "weights", "recompute": "auto"}, "train.recompute = 'auto' does not work with train.sharding ="),
    ({"deterministic": 1}, "train.deterministic is 1; write True, False, or a whole number of at least 2"),
    ({"deterministic": 65}, "= 65 cuts a batch into 65 parts, and there are 64 examples of a batch. Write a"),
    ({"deterministic": 4, "model": counting_model}, "along. Take such a layer out"),
    ({"deterministic": 4, "xla": "on"}, "Write train.xla = 'pass'. Received: 'on'."),
    ({"deterministic": 4, "xla": "pass", "model": deep_convnet_model}, "Write train.xla = 'off'. Received: 'pass'"),
    (
        {"deterministic": 4, "synchronize_batch_norm": False},
        "train.synchronize_batch_norm = False does not work with train.deterministic = 4. Leave one of the two out",
    ),
    (
        {"sharding": "weights", "callbacks": [keras.callbacks.EarlyStopping("loss", restore_best_weights=True)]},
        "train.callbacks has EarlyStopping, which copies all weights",
    ),
    ({"sharding": ["dense"], "xla": "on"}, "train.xla = 'on' does not work with train.sharding = ['dense']"),
    ({"sharding": []}, "write one of 'optimizer', 'host', 'weights', or a list of patterns"),
    ({"sharding": "weights", "log_gradient_norm": True}, "train.log_gradient_norm = True does not work with"),
)


def test_layers_are_cut_along_what_is_theirs_alone() -> None:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(100, 16, name="words")(inputs)
    x = keras.layers.MultiHeadAttention(4, 4, name="attention")(x, x)
    x = keras.layers.Dense(6, kernel_regularizer="l2", name="penalized")(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="odd")(x))
    found = choose_splits(model, ["words", "att*"], 4)
    splits = {split.variable.path: (split.axis, split.output_axis) for split in found}
    assert splits == {
        "words/embeddings": (1, -1),
        "attention/query/kernel": (1, 2),  # heads
        "attention/key/kernel": (1, 2),
        "attention/value/kernel": (1, 2),
        "attention/attention_output/kernel": (2, 2),
    }
    for pattern in ("penalized", "odd", "none"):
        with pytest.raises(UserError, match=f"names '{pattern}', and no layer of that name"):
            choose_splits(model, [pattern], 2)


def test_a_penalty_of_spread_weights_is_refused() -> None:
    strategy = Mirrored(num_cpu_devices=1)
    strategy.connect()
    strategy._topology = type(strategy.topology)(0, 2, 1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, kernel_regularizer="l2")], name="penalized")
    with pytest.raises(UserError, match="cannot spread the layer 'penalized': it adds a penalty of"):
        Shards(strategy, model.trainable_variables, "weights", [model])


@pytest.mark.parametrize(("name", "clipnorm"), [("Lamb", None), ("Muon", None), ("Adam", 1.0)])
def test_what_looks_at_whole_variables_is_refused(name: str, clipnorm: float | None) -> None:
    strategy = Mirrored(num_cpu_devices=1)
    strategy.connect()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    shards = Shards(strategy, model.trainable_variables, None, split={id(model.layers[-1].kernel): 1})
    with pytest.raises(UserError, match="looks at whole ones"):
        made = getattr(keras.optimizers, name)(clipnorm=clipnorm)
        build_sharded(made, model.trainable_variables, Patches(), shards)


@pytest.mark.slow
def test_a_model_that_does_not_fit_into_a_process_is_trained_by_two(tmp_path: pathlib.Path) -> None:
    """400 MB of weights and as many of gradients, 800 of slots, and what sends them, where 2,100 MB are allowed."""

    def done(name: str, sharding: str, megabytes: int) -> support.Finished:
        arguments = [tmp_path / name, "multi_worker", sharding, str(megabytes)]
        return support.run_module("training.too_large", *arguments, launch=("--workers=2", "--max_restarts=0"))

    failed = done("whole", "none", 2_100)
    assert failed.status != 0 and "SIGKILL" in failed.stderr, failed.stderr
    done("sharded", "weights", 2_100).check()
    for worker in range(2):  # of the weights and the slots each has half, with 100 MB for one block at a time
        assert int((tmp_path / f"sharded-built-{worker}").read_text()) < (400 + 800) / 2 + 100
    result = json.loads((tmp_path / "sharded" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 2)


def test_a_model_of_which_nothing_has_a_value_yet_gets_the_same_ones() -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(7)
        inputs = keras.Input((8,))
        x = keras.layers.Dropout(0.5)(keras.layers.Dense(8, name="first")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer="orthogonal")(x))
        model.get_layer("first").bias.assign(np.arange(8.0))  # as one that loads weights does
        return model

    at_once = build()
    with LateValues() as values:
        late = build()
    left_out = late.layers[-1].kernel
    values.assign(but=lambda variable: variable is left_out or variable.path == "first/bias")
    assert_same_bits(late.variables, at_once.variables)
    assert left_out._value is None and keras.Variable(1.0).numpy() == 1.0


def test_a_variable_made_of_an_array_cannot_wait_for_its_value() -> None:
    with pytest.raises(UserError, match="makes one of an array"), LateValues():
        keras.Variable(np.zeros(3))
    assert keras.Variable(np.zeros(3)).shape == (3,)
