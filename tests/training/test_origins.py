"""Weights of every origin load as they were written, with a report; what does not fit is one message.

The files are written here by the libraries themselves, but for Keras 1's and Hugging Face's, whose layouts are
written by hand.
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from equivalence.cases import digits
from gcs.server import GcsServer
from support import REPOSITORY
from training.trainings import run

from tfdist.commands import verbs
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.training.recovery.matching import SavedArray, match_arrays
from tfdist.training.recovery.origins import StartFrom, find_origin
from tfdist.training.recovery.weights import load_weights
from tfdist.training.step.state import ModelState
from tfdist.tuning.search.hypermodel import HyperModel

TOLERANCE = 1e-6
X = np.random.default_rng(0).random((16, 8, 8, 3), np.float32)
Write = Callable[[keras.Model, pathlib.Path], str]


def build_cnn(library: Any = keras, **names: str) -> Any:
    """Layers of which two each have the same shapes; `names` are of the first, the last dense one and a middle one."""
    layers = library.layers
    first, middle, last = ({"name": names[key]} if key in names else {} for key in ("first", "middle", "last"))
    return library.Sequential(
        [
            library.Input((8, 8, 3)) if library is keras else layers.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu", **first),
            layers.BatchNormalization(epsilon=1e-3),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(epsilon=1e-3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4, activation="tanh", **middle),
            layers.Dense(4, activation="tanh"),
            layers.Dense(5, **last),
        ]
    )


def randomize(model: Any) -> Any:
    generator = np.random.default_rng(1)
    model.set_weights([generator.random(weight.shape, np.float32) for weight in model.get_weights()])
    return model


def list_arrays(model: keras.Model) -> dict[str, np.ndarray]:
    """A model's values, by names as TF1's layers have them."""
    arrays = ModelState(model).arrays()
    return {name.removeprefix("model/").removeprefix("sequential/"): array for name, array in arrays.items()}


def write_tf1(model: keras.Model, folder: pathlib.Path) -> str:
    tf1, arrays = tf.compat.v1, list_arrays(model)
    with tf.Graph().as_default(), tf1.Session() as session:
        for name, array in arrays.items():
            tf1.get_variable(name, initializer=array)
            tf1.get_variable(f"{name}/Adam", initializer=array * 0)
        tf1.train.create_global_step()
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver().save(session, str(folder / "tf1" / "model.ckpt"), global_step=900)
        tf1.train.Saver().save(session, str(folder / "tf1" / "model.ckpt"), global_step=1000)
    (folder / "tf1" / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-1000"\n')
    return str(folder / "tf1")


def write_tf2(model: keras.Model, folder: pathlib.Path) -> str:
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=tf.Variable(3))
    return checkpoint.save(str(folder / "tf2" / "ckpt"))


def write_saved_model(model: keras.Model, folder: pathlib.Path) -> str:
    model.export(folder / "saved", verbose=False)
    return str(folder / "saved")


def write_hdf5(model: keras.Model, folder: pathlib.Path) -> str:
    model.compile("adam", "mse")
    model.save(folder / "whole.h5")
    return str(folder / "whole.h5")


def write_keras_1(model: keras.Model, folder: pathlib.Path) -> str:
    """As `Model.save_weights` of Keras 1 does."""
    short = {"kernel": "W", "bias": "b", "moving_mean": "running_mean", "moving_variance": "running_std"}
    with h5py.File(folder / "keras1.weights.h5", "w") as file:
        layers = [layer for layer in model.layers if layer.weights]
        file.attrs["layer_names"] = [f"layer_{index}_z".encode() for index in range(len(layers))]
        for index, layer in enumerate(layers):
            group = file.create_group(f"layer_{index}_z")
            names = [f"layer_{index}_z_{short.get(w.name, w.name)}" for w in layer.weights]
            group.attrs["weight_names"] = [name.encode() for name in names]
            for name, weight in zip(names, layer.weights, strict=True):
                group[name] = weight.numpy()
    return str(folder / "keras1.weights.h5")


def write_pytorch(model: keras.Model, folder: pathlib.Path) -> str:
    """As `safetensors.torch.save_file` does with the state of a torch.nn.Sequential."""
    words = {"kernel": "weight", "gamma": "weight", "beta": "bias", "moving_mean": "running_mean"}
    arrays: dict[str, np.ndarray] = {"1.num_batches_tracked": np.asarray(3)}
    for index, layer in enumerate(model.layers):
        for weight in layer.weights:
            array = weight.numpy()
            if weight.name == "kernel":
                array = array.transpose((3, 2, 0, 1) if array.ndim == 4 else (1, 0))
            arrays[f"{index}.{words.get(weight.name, weight.name.replace('moving_variance', 'running_var'))}"] = array
    (folder / "torch").mkdir()
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    safetensors.numpy.save_file(arrays, folder / "torch" / "model.safetensors")
    return str(folder / "torch")


def write_orbax(model: keras.Model, folder: pathlib.Path) -> str:
    orbax = pytest.importorskip("orbax.checkpoint")
    tree: dict[str, Any] = {"params": {}, "opt_state": [{"mu": np.zeros(3, np.float32)}]}
    for name, array in list_arrays(model).items():
        layer, _, leaf = name.rpartition("/")
        tree["params"].setdefault(layer, {})[leaf] = array
    orbax.PyTreeCheckpointer().save(folder / "orbax", tree)
    return str(folder / "orbax")


WRITERS: tuple[Write, ...] = (
    *(write_tf1, write_tf2, write_saved_model, write_hdf5, write_keras_1, write_pytorch, write_orbax),
)


@pytest.mark.slow
@pytest.mark.parametrize("names", [{}, {"first": "stem", "last": "head"}], ids=["alike", "renamed"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_model_has_the_outputs_of_its_origin(write: Write, names: dict[str, str], tmp_path: pathlib.Path) -> None:
    source = randomize(build_cnn())
    path = write(source, tmp_path)
    model = build_cnn(**names)
    loaded = load_weights(model, path)
    np.testing.assert_allclose(model(X), source(X), rtol=0, atol=TOLERANCE)
    assert len(loaded.report) == len(model.variables) and not loaded.left_out
    assert ("transposed" in str(loaded.report)) == (write is write_pytorch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole.h5", "old_weights.h5", "new.weights.h5", "new.keras", "saved", "objects/c"])
def test_tf_keras_is_read_in_all_of_its_formats(name: str, tmp_path: pathlib.Path) -> None:
    tf_keras = pytest.importorskip("tf_keras")
    source = randomize(build_cnn(tf_keras))
    save = source.save_weights if "weights" in name or "objects" in name else source.save
    save(str(tmp_path / name))
    model = build_cnn()
    load_weights(model, str(tmp_path / name))
    np.testing.assert_allclose(model(X), source(X), rtol=0, atol=TOLERANCE)


def split_heads(name: str, array: np.ndarray, *, transposes: bool) -> np.ndarray:
    """A value of KerasHub's as Hugging Face has it."""
    if "/attention_output/kernel" in name:
        array = array.reshape(-1, array.shape[-1])
    elif "attention" in name and name.endswith(("kernel", "bias")) and "output" not in name and "norm" not in name:
        array = array.reshape(array.shape[0], -1) if name.endswith("kernel") else array.reshape(-1)
    return array.T if transposes and name.endswith("kernel") else array


GPT_2 = {
    "token_embedding": "wte", "position_embedding": "wpe", "self_attention/": "attn/",
    "attn/attention_output": "attn/c_proj", "self_attention_layer_norm": "ln_1", "feedforward_layer_norm": "ln_2",
    "feedforward_intermediate_dense": "mlp/c_fc", "feedforward_output_dense": "mlp/c_proj",
    "layer_norm": "ln_f", "transformer_layer_": "h/", "embeddings": "weight", "kernel": "weight",
    "gamma": "weight", "beta": "bias",
}  # fmt: skip
BERT = {
    "token_embedding/embeddings": "embeddings/word_embeddings/weight",
    "position_embedding/embeddings": "embeddings/position_embeddings/weight",
    "segment_embedding/embeddings": "embeddings/token_type_embeddings/weight",
    "embeddings_layer_norm": "embeddings/LayerNorm", "self_attention_layer/attention_output": "attention/output/dense",
    "self_attention_layer_norm": "attention/output/LayerNorm", "self_attention_layer/": "attention/self/",
    "feedforward_layer_norm": "output/LayerNorm", "feedforward_intermediate_dense": "intermediate/dense",
    "feedforward_output_dense": "output/dense", "transformer_layer_": "encoder/layer/", "pooled_dense": "pooler/dense",
    "kernel": "weight", "gamma": "weight", "beta": "bias",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [("GPT2Backbone", GPT_2), ("BertBackbone", BERT)])
def test_hugging_faces_transformers_load_into_those_of_keras_hub(
    kind: str, words: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    backbone = getattr(pytest.importorskip("keras_hub").models, kind)
    sizes = {"num_layers": 11, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}
    source, model = (backbone(vocabulary_size=20, max_sequence_length=6, **sizes) for _ in range(2))
    arrays = {}
    for name, array in list_arrays(randomize(source)).items():
        array = split_heads(name, array, transposes=kind == "BertBackbone")
        for ours, theirs in words.items():
            name = name.replace(ours, theirs, 1) if ours in f"{name}/" else name
        arrays[name.replace("/", ".")] = np.ascontiguousarray(array)
    if kind == "GPT2Backbone":
        for leaf in ("weight", "bias"):
            for layer in range(11):
                parts = [arrays.pop(f"h.{layer}.attn.{part}.{leaf}") for part in ("query", "key", "value")]
                arrays[f"h.{layer}.attn.c_attn.{leaf}"] = np.concatenate(parts, axis=-1)
    arrays = {f"model.{name}": array.astype(np.float16) for name, array in arrays.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    loaded = load_weights(model, str(tmp_path / "model.safetensors"))
    for name, array in list_arrays(source).items():
        np.testing.assert_array_equal(list_arrays(model)[name], array.astype(np.float16))
    assert all("from float16" in line for line in loaded.report)
    assert ("part 3 of 3" in str(loaded.report)) == (kind == "GPT2Backbone")


# What does not fit


def write_other_head(model: keras.Model, folder: pathlib.Path) -> str:
    return write_hdf5(keras.Sequential([keras.Input((8, 8, 3)), *model.layers[:-1], keras.layers.Dense(7)]), folder)


def write_without_bias(model: keras.Model, folder: pathlib.Path) -> str:
    path = f"{write_tf1(model, folder)}/model.ckpt-1000"
    reader = tf.train.load_checkpoint(path)
    names = [name for name in reader.get_variable_to_shape_map() if name != "dense_2/bias"]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name in names:
            tf.compat.v1.get_variable(name, initializer=reader.get_tensor(name))
        session.run(tf.compat.v1.global_variables_initializer())
        return tf.compat.v1.train.Saver().save(session, str(folder / "short" / "model.ckpt"))


def write_named_by_words(model: keras.Model, folder: pathlib.Path) -> str:
    words = {"conv2d_1": "eye", "conv2d": "ear", "dense_1": "arm", "dense_2": "leg", "dense": "toe"}
    arrays = {}
    for name, array in list_arrays(model).items():
        layer, _, leaf = name.partition("/")
        arrays[f"{words.get(layer, layer)}/{leaf}"] = array
    safetensors.numpy.save_file(arrays, folder / "words.safetensors")
    return str(folder / "words.safetensors")


def write_another(model: keras.Model, folder: pathlib.Path) -> str:
    return write_saved_model(randomize(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])), folder)


def write_damaged(model: keras.Model, folder: pathlib.Path) -> str:
    prefix = pathlib.Path(write_tf2(model, folder))
    data = next(prefix.parent.glob("*.data-*"))
    data.write_bytes(bytes(byte ^ 255 for byte in data.read_bytes()))
    return str(prefix)


def write_linked(model: keras.Model, folder: pathlib.Path) -> str:
    path = pathlib.Path(write_hdf5(model, folder))
    path.rename(folder / "secret.h5")
    with h5py.File(path, "w") as file, h5py.File(folder / "secret.h5") as secret:
        secret.copy("model_weights", file)
        layer = next(iter(file["model_weights"].attrs["layer_names"]))
        part = next(iter(file["model_weights"][layer]))
        del file["model_weights"][layer][part]
        file["model_weights"][layer][part] = h5py.ExternalLink("secret.h5", f"/model_weights/{layer}/{part}")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "words"),
    [
        (write_other_head, ["whole.h5 (a Keras file) does not fit this model: 16 of its 18", "float32[4, 7]"]),
        (write_without_bias, ["(a TensorFlow checkpoint)", "17 of its 18", "dense_2/bias float32[5]: not in"]),
        (write_named_by_words, ["words.safetensors (safetensors)", "leg/kernel", "names={'HERE/(.*)': 'THERE/"]),
        (write_another, ["saved (a SavedModel)", "0 of its 18", "/kernel float32[3, 2]: only in"]),
        (write_damaged, ["cannot be read as a TensorFlow checkpoint", "Copy it again"]),
        (write_linked, ["lies in another file"]),
    ],
)
def test_what_does_not_fit_is_one_message_and_loads_nothing(
    write: Write, words: list[str], tmp_path: pathlib.Path
) -> None:
    path = write(randomize(build_cnn()), tmp_path)
    model = build_cnn()
    before = model.get_weights()
    with pytest.raises(UserError) as refused:
        load_weights(model, path)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))


def test_layers_that_were_counted_otherwise_are_not_taken_for_each_other() -> None:
    saved = {f"{name}/kernel": SavedArray.of(np.zeros((4, 4), np.float32)) for name in ("dense", "dense_1", "dense_2")}
    specs = {f"{name}/kernel": ((4, 4), "float32") for name in ("stem", "dense", "dense_1")}
    match = match_arrays(saved, specs)
    # By shape they are in order: the first dense layer there is "stem" here.
    assert [source.name for source in match.sources.values()] == ["dense/kernel", "dense_1/kernel", "dense_2/kernel"]
    match = match_arrays(saved, specs | {"branch/kernel": ((4, 4), "float32")})  # of which one is new
    assert not match.sources and len(match.problems) == 7


@pytest.mark.parametrize("item", ["default", "pytree"])
def test_the_item_of_an_orbax_step_is_found(tmp_path: pathlib.Path, item: str) -> None:
    for step in ("2", "10"):
        (tmp_path / step / item).mkdir(parents=True)
        (tmp_path / step / item / "_METADATA").touch()
    found = find_origin(str(tmp_path))
    assert found is not None and found[1] == str(tmp_path / "10" / item)


def test_orbax_that_is_not_installed_is_named_with_its_extra(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "_METADATA").write_text("{}")
    with pytest.raises(UserError, match=r"pip install 'tfdist\[orbax\]'"):
        load_weights(build_cnn(), str(tmp_path))


# By settings, from a bucket, to another format


@pytest.mark.slow
def test_a_part_is_taken_where_it_is_asked_for_and_reported(tmp_path: pathlib.Path) -> None:
    def build(classes: int = 10) -> keras.Model:
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(8, name="body"), keras.layers.Dense(classes)])

    source = randomize(build(classes=3))
    path = write_hdf5(source, tmp_path)
    still = {"model": build, "train_data": lambda: digits(64), "epochs": 1}
    still |= {"optimizer": lambda: keras.optimizers.SGD(0.0)}
    refused = run(tmp_path / "a", may_fail=True, **still | {"start_from": path}).error
    assert isinstance(refused, UserError) and "StartFrom(path, partial=True)" in str(refused)
    trained = run(tmp_path / "b", **still | {"start_from": StartFrom(path, partial=True)})
    np.testing.assert_array_equal(trained.model.layers[0].kernel, source.layers[0].kernel)
    (event,) = trained.events("weights_loaded")
    assert len(event["details"]["variables"]) == 2 and "body/kernel: " in event["details"]["variables"][0]
    (event,) = trained.events("partially_restored")
    assert any("dense/kernel: float32[8, 3] in the checkpoint" in line for line in event["details"]["left_out"])


OPTIMIZERS = {"Adam": lambda: keras.optimizers.Adam(0.1), "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "other"), [("Adam", "SGD"), ("SGD", "Adam")])
@pytest.mark.parametrize("name", ["model.keras", "model.h5", "objects", "run"])
def test_an_optimizer_continues_as_fit_does(name: str, kind: str, other: str, tmp_path: pathlib.Path) -> None:
    def train(directory: str, start_from: StartFrom, kind: str, epochs: int) -> tuple[list[np.ndarray], str]:
        data = {"train_data": lambda: (x, y), "global_batch_size": 64, "shuffle": False, "eval_data": None}
        made = {"model": build, "optimizer": OPTIMIZERS[kind], "start_from": start_from}
        trained = run(tmp_path / directory, **data, **made, epochs=epochs)
        return trained.weights(), str(trained.events("weights_loaded"))

    def build() -> keras.Model:
        return keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(10)])

    x, y = digits(64)
    model, path = build(), str(tmp_path / name)
    model.compile(OPTIMIZERS[kind](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.save(tmp_path / "first.keras")
    model.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0)
    if name == "run":
        train(name, StartFrom(str(tmp_path / "first.keras")), kind, epochs=5)
    elif name == "objects":
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path)
    else:
        model.save(path)
    model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0)
    weights, report = train("b", StartFrom(path, optimizer=True), kind, epochs=3)
    assert all(np.allclose(*pair, rtol=0, atol=TOLERANCE) for pair in zip(weights, model.get_weights(), strict=True))
    assert "dense/kernel/momentum: optimizer/" in report and "initial value" not in report
    _, report = train("c", StartFrom(path, optimizer=True), other, epochs=1)
    assert "dense/kernel/momentum: begins at its initial value" in report


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_tf1, write_saved_model, write_hdf5, write_pytorch])
def test_a_bucket_has_what_a_disk_has(write: Write, tmp_path: pathlib.Path, gcs: GcsServer) -> None:
    source = randomize(build_cnn())
    path = pathlib.Path(write(source, tmp_path))
    for each in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        files.write_atomic(f"gs://bucket/{each.relative_to(tmp_path)}", each.read_bytes())
    model = build_cnn()
    load_weights(model, f"gs://bucket/{path.relative_to(tmp_path)}")
    np.testing.assert_allclose(model(X), source(X), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_weights_are_converted_with_a_model_and_without(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = randomize(build_cnn())
    path = write_tf1(source, tmp_path)
    assert verbs.run(["convert", path, "arrays.safetensors"]) == 0
    arrays = safetensors.numpy.load_file("arrays.safetensors")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: array.tolist() for name, array in list_arrays(source).items()
    }
    assert verbs.run(["convert", path, "arrays.safetensors"]) == 2 and "exists" in capsys.readouterr().err
    assert verbs.run(["convert", path, "model.keras"]) == 2
    assert "tfdist convert" in capsys.readouterr().err
    digits_gin = str(REPOSITORY / "tfdist" / "configs" / "experiments" / "digits.gin")
    assert verbs.run(["convert", path, "model.keras", digits_gin]) == 2  # of which it is no model
    assert "does not fit this model" in capsys.readouterr().err and not pathlib.Path("model.keras").exists()


@pytest.mark.slow
def test_weights_of_a_run_are_converted_by_its_hyperparameters(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = REPOSITORY / "tfdist" / "configs" / "experiments" / "digits.gin"
    layers = "[keras.Input((64,)), keras.layers.Dense(hp.Int('n', 8, 64))]"
    (tmp_path / "sized.py").write_text(f"import keras\ndef build(hp): return keras.Sequential({layers})\n")
    (tmp_path / "sized.gin").write_text(f"import sized\ninclude '{digits}'\ntrain.model = @sized.build\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = HyperModel(importlib.import_module("sized").build, {"n": 12})
    (tmp_path / "run").mkdir()
    model().save_weights("run/model.weights.h5")
    model.write("run")
    assert verbs.run(["convert", "run/model.weights.h5", "arrays.safetensors", "sized.gin"]) == 0
    shapes = [array.shape for array in safetensors.numpy.load_file("arrays.safetensors").values()]
    assert sorted(shapes) == [(12,), (64, 12)]
