"""`tfdist.fit` beside what `keras.Model.fit` has: a run directory, strategies, what it tells, what it stands on."""

from __future__ import annotations

import collections
import functools
import json
import math
import pathlib
import pickle
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from equivalence.cases import random_model
from fuzz.fit_parts import Batches
from keras_fit.behaviors import CROSSENTROPY, X, Y, batches, by_position, classifier, dataset
from keras_fit.test_behaviors import differences
from keras_fit.under_workers import fit_in_own_order
from training.test_resume import Once, send

import tfdist
from tfdist.checkpoint import policy
from tfdist.data.sources.arrays import ArraySource
from tfdist.errors import EXIT_NOT_SAVED
from tfdist.keras_fit.compiled_model import identity_of
from tfdist.tasks.losses import weigh_classes
from tfdist.training.step.layer_state import ThreadLosses

SCRIPT = pathlib.Path(__file__).with_name("under_mirrored.py")


def interrupt() -> None:
    raise InterruptedError


def state(model: keras.Model) -> list[Any]:
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def fit(model: keras.Model, **changes: Any) -> keras.callbacks.History:
    return tfdist.fit(model, X, Y, **{"validation_data": (X[:20], Y[:20]), "verbose": 0} | changes)


@pytest.mark.slow
def test_a_finished_run_gives_its_weights_and_history_and_goes_on_with_more_epochs(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained, again, further, whole = (classifier() for _ in range(4))
    once = fit(trained, epochs=2, run_dir=str(tmp_path / "run"))
    assert not "".join(capfd.readouterr())
    twice = fit(again, epochs=2, run_dir=str(tmp_path / "run"))
    (line,) = "".join(capfd.readouterr()).splitlines()
    assert "is finished" in line
    assert twice.history == once.history and twice.epoch == [0, 1]
    assert not differences(state(trained), state(again))
    assert again.evaluate(X, Y, verbose=0) == trained.evaluate(X, Y, verbose=0)

    more = fit(further, epochs=4, run_dir=str(tmp_path / "run"))
    all_at_once = fit(whole, epochs=4, run_dir=str(tmp_path / "whole"))
    assert more.history == all_at_once.history and more.epoch == [0, 1, 2, 3]
    assert not differences(state(further), state(whole))
    assert int(further.optimizer.iterations) == 8

    with pytest.raises(ValueError, match="another experiment"):
        fit(classifier(), epochs=4, batch_size=10, run_dir=str(tmp_path / "run"))


@pytest.mark.slow
def test_a_run_of_another_optimizer_loss_model_or_of_other_arrays_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    def compiled(
        rate: float = 0.1, loss: str = CROSSENTROPY, units: int = 4, names: str = "pq", skips: bool = False, **how: Any
    ) -> keras.Model:
        inputs = keras.Input(X.shape[1:])
        first = keras.layers.Dense(units, name=names[0])(inputs)
        second = keras.layers.Dense(units, name=names[1])(first)
        outputs = keras.layers.Softmax()(keras.layers.Add()([first if skips else second, second]))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(rate), loss, **how)
        return model

    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=100.0)
    place, model = str(tmp_path / "run"), compiled()
    first = tfdist.fit(model, X, Y, epochs=2, verbose=0, run_dir=place, callbacks=plateau)
    others = [(compiled(0.5), Y, "optimizer"), (compiled(units=5), Y, "model"), (compiled(), Y[::-1], "data")]
    others += [(compiled(loss="mse"), Y, "loss"), (compiled(loss_weights=[2.0]), Y, "loss_weights")]
    for other, labels, name in [*others, (compiled(names="qp"), Y, "model"), (compiled(skips=True), Y, "model")]:
        with pytest.raises(ValueError, match=f"another experiment(.|\n)* {name}: (.|\n)*accept_changes = True"):
            tfdist.fit(other, X, labels, epochs=2, verbose=0, run_dir=place)
    with pytest.raises(ValueError, match=r"another experiment(.|\n)* validation_data: the default there, "):
        tfdist.fit(compiled(), X, Y, epochs=2, verbose=0, run_dir=place, validation_data=(X, Y))
    again = compiled()
    assert tfdist.fit(again, X, Y, epochs=2, verbose=0, run_dir=place).history == first.history
    # The same optimizer, whose rate a callback has changed since.
    assert tfdist.fit(model, X, Y, epochs=3, verbose=0, run_dir=place, callbacks=plateau).epoch == [0, 1, 2]
    tfdist.fit(compiled(0.5), X, Y, epochs=4, verbose=0, run_dir=place, accept_changes=True)


@pytest.mark.slow
def test_a_dataset_of_other_contents_resumes_and_one_with_other_epochs_is_refused(tmp_path: pathlib.Path) -> None:
    def train(count: int, epochs: int, **how: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).take(count)
        return tfdist.fit(classifier(), data, epochs=epochs, verbose=0, run_dir=str(tmp_path / str(len(how))), **how)

    train(3, 1, steps_per_epoch=3)
    assert train(5, 2, steps_per_epoch=3).epoch == [0, 1]
    train(3, 1)
    with pytest.raises(ValueError, match=r"another experiment(.|\n)*steps of an epoch: 3 there, 5 here"):
        train(5, 2)


@pytest.mark.slow
def test_a_backup_of_another_experiment_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)
    with pytest.raises(InterruptedError):
        fit(classifier(), epochs=2, callbacks=[Once("on_epoch_begin", 2, interrupt), backup])
    with pytest.raises(ValueError, match=r"another experiment(.|\n)* loss: (.|\n)*Give another backup_dir"):
        fit(classifier(loss="mse"), epochs=2, callbacks=backup)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_has_to_leave_and_cannot_save_exits_with_the_status_that_says_so(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    (tmp_path / "checkpoints").symlink_to("/proc/sys/vm")  # where even the superuser makes nothing
    with pytest.raises(SystemExit) as ended:
        fit(classifier(), epochs=4, callbacks=Once("on_epoch_end", 1, send(number)), run_dir=str(tmp_path))
    assert ended.value.code == EXIT_NOT_SAVED
    assert "could not save" in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on(tmp_path: pathlib.Path) -> None:
    model, whole = classifier(), classifier()
    leaves = Once("on_epoch_end", 2, send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="after saving"):
        fit(model, epochs=4, callbacks=leaves, run_dir=str(tmp_path / "run"))
    assert model.compiled and len(model.evaluate(X, Y, verbose=0)) == 2
    resumed = classifier()
    history = fit(resumed, epochs=4, run_dir=str(tmp_path / "run"))
    expected = fit(whole, epochs=4, run_dir=str(tmp_path / "whole"))
    assert history.history == expected.history
    assert not differences(state(resumed), state(whole))


@pytest.mark.slow
def test_a_backup_and_restore_among_the_callbacks_has_a_call_that_was_cut_off_go_on(tmp_path: pathlib.Path) -> None:
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=1)
    changes = {"epochs": 4, "batch_size": 20}
    with pytest.raises(InterruptedError):
        fit(classifier(), callbacks=[Once("on_train_batch_end", 6, interrupt), backup], **changes)
    assert all(path.name.startswith(("step-", ".")) for path in (tmp_path / "backup").iterdir())
    resumed, whole = classifier(), classifier()
    begun = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    epochs: list[int] = []
    history = fit(resumed, callbacks=[begun, backup], **changes)
    expected = fit(whole, seed=0, **changes)
    assert epochs[-1] == 3 and len(epochs) < 4, "it did not go on"
    assert history.history == expected.history and history.epoch == [0, 1, 2, 3]
    assert not differences(state(resumed), state(whole))
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
def test_without_a_run_dir_nothing_is_kept_and_each_call_shuffles_anew(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    one, other, same = classifier(), classifier(), classifier()
    keras.utils.set_random_seed(3)
    fit(one, epochs=1)
    fit(other, epochs=1)
    assert differences(state(one), state(other))
    keras.utils.set_random_seed(3)
    fit(same, epochs=1)
    assert not differences(state(one), state(same))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cell_that_is_run_again_trains_on_without_a_warning(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    model = classifier()
    for cell in range(1, 7):  # in the fifth TensorFlow would warn of what is traced again
        tfdist.fit(model, X, Y, epochs=2)
        assert int(model.optimizer.iterations) == 2 * cell * math.ceil(len(X) / 32)
    assert not capfd.readouterr().err
    assert not [each for each in recwarn if not issubclass(each.category, DeprecationWarning)]  # Keras's own


@pytest.mark.slow
def test_what_each_verbose_tells(capfd: pytest.CaptureFixture[str]) -> None:
    says = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("mine"))
    lines = {}
    for verbose in (0, 1, 2, "auto", False):
        fit(classifier(), epochs=2, verbose=verbose, callbacks=says)
        lines[str(verbose)] = capfd.readouterr().out.splitlines()
    assert lines["0"] == lines["False"] == ["mine"] * 2
    assert [line.split()[0] for line in lines["2"]] == ["epoch", "mine"] * 2
    assert len(lines["1"]) > len(lines["2"])
    # How many epochs have a line is a matter of time.
    one, auto = (sum(not line.startswith("epoch ") for line in lines[verbose]) for verbose in ("1", "auto"))
    assert one == auto
    assert not any("tfdist-fit" in line for line in lines["1"]), "no path of what is not kept"


@pytest.mark.slow
def test_a_generator_is_read_no_further_than_needed_and_one_that_ends_is_said() -> None:
    given = batches()
    tfdist.fit(classifier(), given, epochs=2, steps_per_epoch=3, verbose=0)
    assert np.array_equal(next(given)[0], X[10:20])  # 6 batches of 5
    with pytest.raises(ValueError, match=r"ended after 4 batches, and 6 are needed"):
        tfdist.fit(classifier(), batches(4), epochs=2, steps_per_epoch=3, verbose=0)


def logged_epochs(path: pathlib.Path) -> list[int]:
    header, *rows = path.read_text().splitlines()
    assert header.startswith("epoch,")
    return [int(row.partition(",")[0]) for row in rows]


@pytest.mark.slow
def test_a_csv_logger_has_each_epoch_once_after_kills_repetitions_and_extensions(tmp_path: pathlib.Path) -> None:
    path, run_dir = tmp_path / "log.csv", str(tmp_path / "run")

    def call(epochs: int, *others: Any, append: bool = False, **changes: Any) -> list[int]:
        logger = keras.callbacks.CSVLogger(str(path), append=append)
        fit(classifier(), callbacks=[logger, *others], **{"epochs": epochs, "run_dir": run_dir} | changes)
        return logged_epochs(path)

    assert call(2) == call(2) == [0, 1]
    saves = policy.CheckpointPolicy(every_epochs=2)
    with pytest.raises(InterruptedError):
        call(6, Once("on_epoch_end", 3, interrupt), checkpoint=saves)  # the fifth
    assert logged_epochs(path) == [0, 1, 2, 3, 4]
    with path.open("a") as file:
        file.write("5,0.2")  # as a kill leaves it
    assert call(6, append=True, checkpoint=saves) == [0, 1, 2, 3, 4, 5]
    both = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]
    assert call(7, append=True, run_dir=str(tmp_path / "other")) == both
    assert call(6, append=True, checkpoint=saves) == both  # of which the last rows are another run's
    third = {"append": True, "run_dir": str(tmp_path / "third"), "checkpoint": policy.CheckpointPolicy(every_steps=1)}
    with pytest.raises(InterruptedError):
        call(1, Once("on_train_batch_end", 2, interrupt), **third)
    assert call(1, **third) == [*both, 0]
    assert call(1, run_dir=None) == [0]


def gap(a: Any, b: Any, power: float) -> Any:
    return keras.ops.mean(keras.ops.abs(a - b) ** power, axis=-1)


def test_a_model_and_a_loss_that_keras_cannot_write_leave_weights_and_are_known_without_addresses(
    tmp_path: pathlib.Path,
) -> None:
    slope = functools.partial(keras.activations.leaky_relu, negative_slope=0.1)
    model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(1, activation=slope)])
    model.compile("sgd", functools.partial(gap, power=2))
    tfdist.fit(model, X, X[:, :1], verbose=0, run_dir=str(tmp_path))
    assert (tmp_path / "export" / "model.weights.h5").exists()
    assert "which has a get_config that Keras cannot write" in (tmp_path / "events.jsonl").read_text()
    loss = json.loads((tmp_path / "run.json").read_text())["settings"]["fit.loss"]
    assert re.fullmatch(r"\['functools.partial', \['gap \w{8}', \{'power': 2\}\]\]", loss), loss


class Scaled(keras.losses.Loss):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, a: Any, b: Any) -> Any:
        return self.factor * keras.ops.mean(keras.ops.abs(a - b), axis=-1)


class Applied(keras.layers.Layer):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate / (1.0 + keras.ops.cast(step, "float32"))


class Whole(keras.Model):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor


def compile_parts(layer: Any = None, loss: Any = "mse", optimizer: Any = "sgd") -> keras.Model:
    model = layer if isinstance(layer, keras.Model) else keras.Sequential([layer] if layer else [])
    model.compile(optimizer, loss)
    return model


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("loss", lambda factor: compile_parts(loss=Scaled(factor))),
        ("loss", lambda factor: compile_parts(loss=lambda a, b: factor * gap(a, b, 1.0))),
        ("loss", lambda factor: compile_parts(loss=functools.partial(gap, power=factor))),
        ("model", lambda factor: compile_parts(Applied(lambda x: factor * x))),
        ("model", lambda factor: compile_parts(keras.layers.Dense(1, activation=lambda x: factor * x))),
        ("model", lambda factor: compile_parts(Whole(factor))),
        ("optimizer", lambda factor: compile_parts(optimizer=keras.optimizers.SGD(Halving(factor)))),
    ],
)
def test_code_and_arguments_tell_one_experiment_from_another(name: str, build: Callable[[float], keras.Model]) -> None:
    sources = {"data": ArraySource((X, Y))}
    first, again, other = (identity_of(build(factor), sources) for factor in (0.1, 0.1, 0.2))
    assert first == again and {key for key in first if first[key] != other[key]} == {f"fit.{name}"}
    assert " at 0x" not in json.dumps(first)


class Remembers(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.by_number: dict[int, float] = {}
        self.seen: set[int] = set()
        self.lists = collections.defaultdict(list)
        self.counts: collections.Counter[str] = collections.Counter()
        self.last: collections.deque[int] = collections.deque(maxlen=3)
        self.total = keras.Variable(0.0)
        self.raw: dict[str, bytes] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.by_number[epoch] = logs["loss"]
        self.seen.add(epoch)
        self.lists["loss"].append(epoch)
        self.counts["epochs"] += 1
        self.last.append(epoch)
        self.total.assign_add(1.0)
        self.raw[str(epoch)] = b"bytes"


@pytest.mark.slow
def test_collections_and_variables_of_callbacks_come_back_and_what_does_not_is_named_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = policy.CheckpointPolicy(every_epochs=1)
    for epochs in (2, 4):
        remembers = Remembers()
        fit(classifier(), epochs=epochs, run_dir=str(tmp_path / "run"), callbacks=remembers, checkpoint=saves)
        assert list(remembers.by_number) == list(range(epochs)) and remembers.seen == set(range(epochs))
        assert remembers.lists == {"loss": list(range(epochs))} and remembers.lists["new"] == []
        assert remembers.counts == {"epochs": epochs} and float(remembers.total) == epochs
        assert list(remembers.last) == list(range(epochs))[-3:] and remembers.last.maxlen == 3
        assert [each.message for each in caplog.records if "cannot be kept" in each.message] == [
            "Remembers.raw cannot be kept in checkpoints: a resumed run begins with what on_train_begin sets. "
            "Checkpoints keep numbers, texts and arrays, and lists, dicts, sets and variables of them."
        ]
        caplog.clear()


class Changing(keras.utils.PyDataset):
    """Four examples a batch, all of the batch's number; `on_epoch_end` goes on to the next length."""

    def __init__(self, *lengths: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lengths, self.epoch = lengths, 0

    def __len__(self) -> int:
        return self.lengths[min(self.epoch, len(self.lengths) - 1)]

    def __getitem__(self, index: int) -> Any:
        return np.full((4, 1), index, np.float32), np.zeros((4, 1), np.float32)

    def on_epoch_end(self) -> None:
        self.epoch += 1


def counter(length: int = 6) -> keras.Model:
    """A model whose weights count how often it was trained on each batch."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(length, 1, "zeros"), keras.layers.Flatten()])
    model.compile(keras.optimizers.SGD(1.0), lambda y, p: -p[:, 0])
    return model


@pytest.mark.slow
def test_every_epoch_begins_a_pass_of_data_that_grows_and_data_that_shrinks_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = counter(), counter()
    tfdist.fit(ours, Changing(2, 4, 6), epochs=3, shuffle=False, verbose=0)
    theirs.fit(Changing(2, 4, 6), epochs=3, shuffle=False, verbose=0)
    assert np.array_equal(ours.get_weights()[0], theirs.get_weights()[0])
    assert ours.get_weights()[0].ravel().tolist() == [3, 3, 0, 0, 0, 0]
    assert len([each for each in caplog.records if "has 4 now: an epoch takes the first 2" in each.message]) == 1
    evaluated = tfdist.fit(counter(), X[:4, :1] * 0, Y[:4], epochs=3, validation_data=Changing(2, 4, 6), verbose=0)
    assert evaluated.history["val_loss"] == [-1 / 2, -2 / 2, -3 / 2]  # the first batch of two is trained on
    with pytest.raises(ValueError, match=r"had 6 batches for an epoch at first, and has 4 now.*steps_per_epoch"):
        tfdist.fit(counter(), Changing(6, 6, 4), epochs=3, shuffle=False, verbose=0)


@pytest.mark.slow
def test_a_dataset_that_raises_in_all_its_workers_ends_the_call() -> None:
    class Broken(Changing):
        def __getitem__(self, index: int) -> Any:
            if index >= 4:
                raise RuntimeError("this batch is broken")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="this batch is broken"):
        tfdist.fit(counter(40), Broken(40, workers=2), epochs=2, shuffle=False, verbose=0)


class Counts(keras.layers.Layer):
    """Counts its calls, and adds a loss."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum", name="count")

    def call(self, x: Any, training: bool = False) -> Any:
        self.add_loss(0.01 * keras.ops.mean(x))
        if training:
            self.count.assign_add(1.0)
        return x


def counting() -> keras.Model:
    layers = [Counts(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3, activation="softmax")])
    optimizer = keras.optimizers.Adam(0.01, loss_scale_factor=8.0)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def parts(model: keras.Model) -> list[Any]:
    layers = model._flatten_layers()
    generators = [each for layer in layers for each in getattr(layer, "_seed_generators", ())]
    return [*layers, *generators, model.optimizer, *model.variables, *model.optimizer.variables]


@pytest.mark.slow
def test_random_layers_draw_what_they_draw_in_fit() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(320, 64)).astype("float32"), rng.integers(0, 10, 320)
    weights, losses = [], []
    for fit in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(3)
        model = random_model()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses.append(fit(model, x, y, batch_size=32, epochs=5, shuffle=False, verbose=0).history["loss"])
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"deterministic": 4}, {"num_microbatches": np.int64(3)}], ids=str)
def test_parts_of_a_datasets_batches_are_those_of_arrays(settings: dict[str, int]) -> None:
    weights = []
    for data, size in ((dataset(8), None), ((X, Y), 8)):
        keras.utils.set_random_seed(3)
        model = classifier()
        arguments = {"batch_size": size} if size else {}
        given = data if isinstance(data, tuple) else (data,)
        tfdist.fit(model, *given, epochs=2, shuffle=False, verbose=0, **arguments, **settings)
        weights.append(model.get_weights())
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def check_that_fit_leaves_objects_as_they_were(model: keras.Model, **arguments: Any) -> None:
    """But for the History, that the model was called, and what its layers added to its loss."""

    def attributes(part: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(part).items() if name not in ("history", "_called")}

    before = [(part, attributes(part)) for part in parts(model)]
    tfdist.fit(model, X, Y, verbose=0, **arguments)
    for part, had in before:
        now = attributes(part)
        assert now.keys() == had.keys(), part
        for name in now.keys() - {"_losses", "_loss_ids"}:
            same = now[name] == had[name] if isinstance(had[name], bool | int | float) else now[name] is had[name]
            assert same, f"{name} of {part}"
        assert not isinstance(now.get("_losses"), ThreadLosses)


@pytest.mark.slow
def test_fit_leaves_no_patch_on_the_model_and_its_optimizer() -> None:
    model = counting()
    check_that_fit_leaves_objects_as_they_were(model)
    check_that_fit_leaves_objects_as_they_were(model)
    assert model.optimizer.loss_scale_factor == 8.0 and float(model.layers[0].count) == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [0, 2])
def test_what_the_data_raises_comes_out_as_it_is(fails_at: int) -> None:
    datasets = [Batches((X, Y), 13, fails_at=fails_at, workers=workers) for workers in (1, 2)]
    for data in (*datasets, (datasets[0][index] for index in range(4))):
        with pytest.raises(LookupError, match="the file of a batch is gone"):
            tfdist.fit(classifier(), data, steps_per_epoch=3, shuffle=False, verbose=0)


class FailsLater(Batches):
    """Raises in batches that are read ahead of a training's end."""

    def __init__(self) -> None:
        super().__init__((X, Y), 1, workers=2)
        self.has_failed = threading.Event()

    def __getitem__(self, index: int) -> Any:
        if index < 12:
            return super().__getitem__(index)
        self.has_failed.set()
        raise LookupError("the file of a batch is gone")


def test_a_batch_that_nobody_takes_may_fail() -> None:
    data, model = FailsLater(), classifier()

    def stop(batch: int, logs: Any) -> None:
        assert data.has_failed.wait(60)
        model.stop_training = True

    stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    assert len(tfdist.fit(model, data, callbacks=[stops], shuffle=False, verbose=0).history["loss"]) == 1


def test_another_backend_of_keras_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match=r"Keras runs on jax\. Set .*KERAS_BACKEND=tensorflow"):
        tfdist.fit(model, X, Y, verbose=0)


@pytest.mark.slow
def test_models_of_a_scope_train_on_its_replicas() -> None:
    """TensorFlow's own MirroredStrategy and tfdist's, against fit on one device."""
    finished = support.run_python([str(SCRIPT)], env=support.TESTS_PATH, timeout=300).check()
    assert finished.stdout.splitlines()[-1] == "all the same"


@pytest.mark.slow
def test_each_of_two_workers_ends_with_the_weights_of_one_device(tmp_path: pathlib.Path) -> None:
    support.run_module("keras_fit.under_workers", tmp_path, launch=support.LAUNCH["multi_worker"]).check()
    first, second = (pickle.loads((tmp_path / str(index)).read_bytes()) for index in range(2))
    refusals = [each.pop("generator") for each in (first, second)]  # a worker's own, or what it hears of the other's
    assert all("A Python generator is read once" in refusal for refusal in refusals)
    assert not differences(first, second)
    assert first.pop("own fit").endswith("Call tfdist.fit(model, …) again.")
    assert not differences(fit_in_own_order(classifier()), first)


# class_weight


def weights_after(model: keras.Model, *data: Any, **arguments: Any) -> list[np.ndarray]:
    tfdist.fit(model, *data, shuffle=False, verbose=0, batch_size=None if len(data) == 1 else 13, **arguments)
    return [np.asarray(each) for each in model.get_weights()]


@pytest.mark.slow
def test_a_class_that_is_not_named_weighs_one_in_a_dataset_as_in_arrays() -> None:
    expected = weights_after(classifier(), X, Y, class_weight={0: 2.0})
    assert not differences(expected, weights_after(classifier(), dataset(), class_weight={0: 2.0}))
    with pytest.raises(ValueError, match="cannot be given at the same time"):
        weights_after(classifier(), dataset().map(lambda x, y: (x, y, y)), class_weight={0: 2.0})


@pytest.mark.slow
def test_a_dataset_may_weigh_the_classes_of_positions() -> None:
    x, y = X[..., np.newaxis], np.arange(200).reshape(50, 4, 1) % 3
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(13)
    models = [by_position() for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    expected = weights_after(models[0], x, y, sample_weight=np.where(y == 1, 5.0, 1.0)[..., 0])
    assert not differences(expected, weights_after(models[1], batches, class_weight={1: 5.0}))


def test_a_table_of_weights_has_no_room_for_the_classes_between_them() -> None:
    labels = tf.constant([0, 10**9, 5, 0, -1], tf.int64)
    assert weigh_classes(labels, {0: 3.0, 10**9: 0.1}).numpy().tolist() == np.float32([3, 0.1, 1, 3, 1]).tolist()


@pytest.mark.slow
def test_a_layer_that_became_trainable_is_named_and_a_schedule_that_goes_on_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = classifier()
    model.layers[1].trainable = False
    model.compile(keras.optimizers.SGD(tfdist.CosineDecay(0.1, "1 of run")), CROSSENTROPY)
    fit(model)
    fit(model, initial_epoch=1, epochs=2)
    assert capfd.readouterr().err == ""
    fit(model)
    assert "The optimizer has made 4 updates, and its CosineDecay counts from the first" in capfd.readouterr().err
    model.layers[1].trainable = True
    model.compile(model.optimizer, CROSSENTROPY)
    with pytest.raises(ValueError, match=r"became trainable after(.|\n)* Call model.compile with a new optimizer"):
        fit(model)


@pytest.mark.slow
def test_a_metric_of_an_output_without_targets_costs_no_training() -> None:
    inputs = keras.Input(X.shape[1:])
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("kind", "size")})
    model.compile("sgd", {"size": "mse"}, metrics={"size": ["mae"]})
    assert list(tfdist.fit(model, X, {"size": X[:, :1]}, verbose=0).history) == ["loss", "size_mae"]
