"""A model's own steps give what `fit` gives on one device, and the same on any engine; killed, they resume exactly."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_fit import own_steps
from keras_fit.own_steps import DATASET, KINDS, Clipped
from keras_fit.under_own_steps import MOVED, arguments_of, collect, find_kind, train
from support import LAUNCH, REPOSITORY, TESTS_PATH, run_module, run_python
from training.test_resume import Once, send

import tfdist
from tfdist import experiment
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice
from tfdist.training.recovery.weights import find_by_path, load_weights
from tfdist.training.run.train_settings import TrainSettings
from tfdist.training.run.validate_run import as_event_log

pytestmark = pytest.mark.slow

HOROVOD = pytest.param("horovod", marks=pytest.mark.horovod)


def run(engine: str, directory: pathlib.Path, *kinds: str, env: dict[str, str] | None = None) -> Any:
    directory.mkdir(exist_ok=True)
    return run_module("keras_fit.under_own_steps", engine, directory, *kinds, launch=LAUNCH.get(engine), env=env)


@functools.cache
def by_fit(kind: str) -> dict[str, np.ndarray]:
    model = find_kind(kind)[0]()
    return collect(model, model.fit(**arguments_of(kind)))


@functools.cache
def on_one_device(kind: str) -> dict[str, np.ndarray]:
    return train(kind, None)


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert list(one) == list(other)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_gives_what_fit_gives(kind: str) -> None:
    assert largest_difference(on_one_device(kind), by_fit(kind)) <= 2e-6


@pytest.mark.parametrize("engine", ["mirrored2", MOVED, "multi_worker", HOROVOD])
def test_each_engine_gives_what_one_device_gives(tmp_path_factory: pytest.TempPathFactory, engine: str) -> None:
    directory = outputs(tmp_path_factory, engine)
    differences = {kind: largest_difference(load(directory, kind), by_fit(kind)) for kind in KINDS}
    tolerances = {kind: 2e-3 if kind == "float16" else 1e-5 for kind in KINDS}
    assert all(differences[kind] <= tolerances[kind] for kind in KINDS), differences


@pytest.mark.horovod
def test_engines_of_two_replicas_give_the_same_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    mirrored, *others = (outputs(tmp_path_factory, engine) for engine in ("mirrored2", "multi_worker", "horovod"))
    for kind in KINDS:
        for other in others:
            assert not largest_difference(load(mirrored, kind), load(other, kind)), (kind, other)


_outputs: dict[str, pathlib.Path] = {}


def outputs(tmp_path_factory: pytest.TempPathFactory, engine: str) -> pathlib.Path:
    """The directory of what an engine gives; it trains when it is first asked for."""
    if engine not in _outputs:
        directory = tmp_path_factory.mktemp(engine)
        run(engine, directory).check()
        _outputs[engine] = directory
    return _outputs[engine]


def load(directory: pathlib.Path, kind: str) -> dict[str, np.ndarray]:
    with np.load(directory / f"{kind}.npz") as found:
        return dict(found)


def test_models_of_kerashub_train_on_one_device_and_two_workers_alike(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("keras_hub")
    from keras_fit.hub_models import MODELS

    run("multi_worker", tmp_path / "run", *MODELS).check()
    for name in MODELS:
        assert largest_difference(train(name, None), by_fit(name)) <= 2e-6, name
        assert largest_difference(load(tmp_path / "run", name), by_fit(name)) <= 1e-5, name


# Those with more to keep than weights and the state of one optimizer, or data that is no array.
STATEFUL = (
    *(DATASET, "GAN", "WGAN-GP", "variational autoencoder", "diffusion", "policy gradient", "graph network"),
    *("mean teacher", "gradient accumulation", "float16", "compute_metrics and compute_loss"),
)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_run_that_is_left_resumes_with_the_same_bits(kind: str, tmp_path: pathlib.Path) -> None:
    leaves = Once("on_train_batch_end", 17, send(signal.SIGTERM))  # in the middle of the third epoch
    with pytest.raises(SystemExit):
        train(kind, None, run_dir=str(tmp_path / "run"), callbacks=[leaves])
    resumed = train(kind, None, run_dir=str(tmp_path / "run"))
    assert not largest_difference(resumed, on_one_device(kind))


def test_a_killed_gan_of_two_workers_resumes_with_the_same_bits(
    tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert run("multi_worker", tmp_path / "killed", "GAN", env={"KILLED_AT": "17"}).status
    assert not list((tmp_path / "killed").glob("*.npz"))
    run("multi_worker", tmp_path / "killed", "GAN", env={"KILLED_AT": "-1"}).check()
    whole = load(outputs(tmp_path_factory, "multi_worker"), "GAN")
    assert not largest_difference(load(tmp_path / "killed", "GAN"), whole)
    events = (tmp_path / "killed" / "run" / "events.jsonl").read_text()
    assert "Resuming at step" in events


MODULE = """\
from keras_fit.own_steps import TARGETS, X, Clipped

class Doubled(Clipped):
    def predict_step(self, data):
        return {"doubled": 2 * super().predict_step(data)}

def build():
    model = Doubled()
    model.compile("adam")
    return model

def load():
    return X, TARGETS
"""
GIN = """\
from __gin__ import dynamic_registration
import own
train.model = @own.build
train.train_data = @own.load
train.eval_data = @own.load
train.strategy = @tfdist.Mirrored()
tfdist.Mirrored.num_cpu_devices = 2
train.epochs = 3
train.global_batch_size = 7
train.seed = 0
"""


def test_an_experiment_trains_evaluates_and_predicts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "own.gin").write_text(GIN)
    path = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, REPOSITORY / "tests", REPOSITORY)))}

    def tfdist(*words: str) -> str:
        return run_python(["-m", "tfdist", *words], env=path, cwd=tmp_path).check().stdout

    assert "its train_step returns" in tfdist("validate", "own.gin")
    assert "plan.gin" in tfdist("plan", "own.gin", "--devices=l4")
    shown = tfdist("train", "own.gin", "--run_dir=run")
    assert "epoch 3/3" in shown and "error" in shown
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    tfdist("evaluate", "run")
    evaluated = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluated["error"] == pytest.approx(result["eval_metrics"]["error"], rel=1e-5)
    tfdist("predict", "run", "predict.data=@own.load")
    predictions = (tmp_path / "run" / "predictions" / "part-00000.jsonl").read_text().splitlines()
    assert len(predictions) == own_steps.ROWS and all('"doubled"' in each for each in predictions)


class Contrastive(own_steps.Netted):
    """A loss over pairs of the batch (Chen et al. 2020), which no replica has all of."""

    units = 4

    def find_loss(self, data: Any) -> Any:
        x, _ = data
        one, other = (keras.ops.normalize(self(view, training=True)) for view in (x, x[:, ::-1]))
        logits = keras.ops.matmul(one, keras.ops.transpose(other))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]), logits)
        return keras.ops.mean(losses)


class Summing(Clipped):
    def find_loss(self, data: Any) -> Any:
        x, y = data
        return keras.ops.sum(keras.ops.square(self(x, training=True) - y))


@pytest.mark.parametrize(("kind", "is_noted"), [(Contrastive, True), (Summing, True), (Clipped, False)])
def test_a_validation_notes_a_step_that_is_no_mean_over_its_batch(kind: Any, is_noted: bool) -> None:
    lines: list[str] = []
    data = KINDS["a step with clipping"][1]
    settings = TrainSettings(
        model=own_steps.compiled(kind), train_data=lambda: data, strategy=OneDevice(), global_batch_size=7, epochs=1
    )
    experiment.validate(settings, lines.append)
    assert any("train_step is no mean over its batch" in line for line in lines) == is_noted, lines


class Hand(Clipped):
    def train_step(self, data: Any) -> dict[str, Any]:
        for variable in self.trainable_weights:
            variable.assign(0.9 * variable)
        return {}


REFUSED: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], str]] = {
    "a step without an optimizer": (own_steps.compiled(Hand), {}, "train_step applies no gradients to an optimizer"),
    "settings": (
        own_steps.compiled(Clipped),
        {"num_microbatches": 2, "log_gradient_norm": True, "xla": "on"},
        "has a train_step, .* of its own.*Leave out: num_microbatches = 2, xla = 'on', log_gradient_norm = True",
    ),
    "accumulation": (
        own_steps.compiled(Clipped, lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)),
        {},
        "Adam.gradient_accumulation_steps is 2",
    ),
}


class ByRow(Clipped):
    train_step = keras.Model.train_step

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        return keras.losses.mean_squared_error(y, y_pred)


def train_by_row_on_two() -> None:
    strategy = Mirrored(num_cpu_devices=2)
    strategy.connect()
    tfdist.fit(own_steps.compiled(ByRow)(), **arguments_of("a step with clipping"), strategy=strategy)


def test_a_loss_of_each_row_is_fits_on_one_device_and_refused_on_two() -> None:
    build, arguments = own_steps.compiled(ByRow), arguments_of("a step with clipping")
    ours, theirs = build(), build()
    by_tfdist, by_keras = collect(ours, tfdist.fit(ours, **arguments)), collect(theirs, theirs.fit(**arguments))
    assert largest_difference(by_tfdist, by_keras) <= 2e-6
    refused = run_python(["-c", "from keras_fit import test_own_steps as t; t.train_by_row_on_two()"], env=TESTS_PATH)
    assert refused.status
    assert "ByRow.train_step differentiates a loss of each row" in refused.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_combined_is_one_message(name: str) -> None:
    build, how, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        tfdist.fit(build(), **arguments_of("a step with clipping"), **how)


class Assembled(own_steps.Gan):
    """Is made of parts, as most are, and has no get_config."""

    def __init__(self, generator: keras.Model, discriminator: keras.Model) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator


def test_a_model_that_keras_cannot_save_leaves_its_weights(tmp_path: pathlib.Path) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(5)
        model = Assembled(own_steps.dense(8, 6), own_steps.dense(8, 1))
        model.compile(own_steps.ADAM(), own_steps.RMSPROP())
        return model

    model, again = build(), build()
    arguments = arguments_of("GAN") | {"epochs": 2, "run_dir": str(tmp_path / "run")}
    history = tfdist.fit(model, **arguments).history
    assert "Keras cannot save Assembled, which has no get_config" in (tmp_path / "run" / "events.jsonl").read_text()
    assert tfdist.fit(again, **arguments).history == history
    loaded = build()
    for net in (loaded.generator, loaded.discriminator):
        net.build((None, 4 if net is loaded.generator else 6))
    loaded.built = True
    loaded.load_weights(tmp_path / "run" / "export" / "model.weights.h5")
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


class Loadable(Clipped):
    def find_loss(self, data: Any) -> Any:
        x, y = data
        return keras.ops.mean(keras.ops.square(self.net(x) - y))

    def get_config(self) -> dict[str, Any]:
        return {}


def test_a_model_that_only_its_step_has_called_is_exported_whole(tmp_path: pathlib.Path) -> None:
    model, (x, y), run_dir = own_steps.compiled(Loadable)(), KINDS["a step with clipping"][1], tmp_path / "run"
    tfdist.fit(model, x, y, batch_size=7, run_dir=str(run_dir), verbose=0)
    expected = model(x)
    kinds = {"Loadable": Loadable}
    loaded = keras.saving.load_model(run_dir / "export" / "model.keras", custom_objects=kinds, compile=False)
    np.testing.assert_array_equal(loaded(x), expected)
    called = Loadable()
    called(x)  # whose variables have other paths than those of the step
    load_weights(called, find_by_path(str(run_dir), "weights", tell=as_event_log(print)))
    np.testing.assert_array_equal(called(x), expected)


def test_the_users_objects_are_as_fit_leaves_them() -> None:
    for kind in ("GAN", "distillation"):
        ours, theirs = KINDS[kind][0](), KINDS[kind][0]()
        tfdist.fit(ours, **arguments_of(kind))
        theirs.fit(**arguments_of(kind))
        assert not vars(ours).keys() - vars(theirs).keys()
        for one, other in zip(all_parts(ours), all_parts(theirs), strict=True):
            assert not vars(one).keys() - vars(other).keys(), one
        again = [model.fit(**arguments_of(kind)).history for model in (ours, theirs)]
        assert again[0] == again[1]


def all_parts(model: keras.Model) -> list[Any]:
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return [*optimizers, *model.metrics, *model.variables, *model._flatten_layers()]
