"""Low-rank adaptation: what is trained, what is exported, and what it refuses."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest
from equivalence.cases import digits
from equivalence.runs import assert_same_bits
from mistakes import each_is_refused
from training.trainings import run

from tfdist.recipes.lora import adapted, load_adapter, read_adapter


def base() -> keras.Model:
    inputs = keras.Input((64,))
    x = keras.layers.Dense(32, "tanh", name="first")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.Sequential([keras.layers.Dense(16, "tanh", name="inner")], name="block")(x)
    return keras.Model(inputs, keras.layers.Dense(10, name="head")(x))


def turned() -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits()
    return 1.0 - images, labels


@pytest.mark.slow
def test_an_adapter_learns_and_its_weights_are_exported_merged_and_alone(tmp_path: pathlib.Path) -> None:
    run(tmp_path / "base", model=base, epochs=4, eval_data=None)
    file = tmp_path / "base" / "export" / "model.keras"
    start = keras.models.load_model(file)
    made = {"model": lambda: adapted(base, rank=3, layers=["first", "inner"]), "train_data": turned, "eval_data": None}
    found = run(tmp_path / "adapted", **made, epochs=6, start_from=str(file))
    names = sorted(v.path.rpartition("/")[2] for v in found.model.trainable_variables)
    assert names == ["lora_kernel_a", "lora_kernel_a", "lora_kernel_b", "lora_kernel_b"]
    points = found.points("train")
    assert points[-1]["loss"] < 0.8 * points[0]["loss"]
    images = turned()[0]
    expected = np.asarray(found.model(images))
    np.testing.assert_allclose(found.exported()(images), expected, atol=1e-5)  # merged
    for name in ("head", "norm"):
        assert_same_bits(*(each.get_layer(name).get_weights() for each in (found.exported(), start)))
    again = adapted(base, rank=3, layers=["first", "inner"])
    again.load_weights(file)
    renamed = {v.path: v for v in again.trainable_variables}
    assert set(renamed) == set(read_adapter(again))
    load_adapter(again, str(tmp_path / "adapted" / "export" / "adapter.npz"))
    np.testing.assert_allclose(again(images), expected, atol=1e-5)
    assert not (tmp_path / "base" / "export" / "adapter.npz").exists()


def test_layers_beside_adapters_may_be_trained_whole() -> None:
    made = adapted(base, layers=["fir*"], also=["head"])
    paths = sorted(v.path for v in made.trainable_variables)
    assert [path.rpartition("/")[2] for path in paths] == ["lora_kernel_a", "lora_kernel_b", "bias", "kernel"]


test_a_mistake_is_one_message = each_is_refused(
    lambda settings: adapted(base, **settings),
    ({"rank": 0}, "lora.adapted.rank is 0"),
    ({"layers": ["fist"]}, "Did you mean 'first'?"),
    ({"layers": ["norm"]}, "names no layer that Keras can adapt"),
    ({"also": ["tail"]}, "lora.adapted.also names 'tail'"),
)
