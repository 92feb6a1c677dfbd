"""What `keras.Model.fit` does, as a list: each behavior is run by Keras's fit and by `tfdist.fit` and compared.

`python -m keras_fit.behaviors` prints the table of docs/fit.md. A behavior gives what can be seen of a run: history,
weights, what callbacks saw. A row that says that something differs or is refused has to be wrong once that ends.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_fit.spies import BatchSpy
from scipy import sparse

Fit = Callable[..., keras.callbacks.History]
Seen = Any
RNG = np.random.default_rng(7)
X = RNG.normal(size=(50, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 50)
HALVES = (X[:, :2], X[:, 2:])
WEIGHTS = np.linspace(0.5, 2.0, 50).astype(np.float32)

CROSSENTROPY = "sparse_categorical_crossentropy"
SAME, DIFFERS, REFUSED = "the same", "differs", "refused"


@dataclasses.dataclass(frozen=True)
class Behavior:
    """One row of the table.

    Attributes:
      area: heads a group of rows.
      name: what a user does.
      run: does it with a `fit(model, …)`; what it returns is compared.
      holds: SAME, DIFFERS or REFUSED.
      note: how it differs, or what the refusal says.
      refusal: a regular expression of the message.
    """

    area: str
    name: str
    run: Callable[[Fit], Seen]
    holds: str = SAME
    note: str = ""
    refusal: str = ""


BEHAVIORS: list[Behavior] = []
AREAS: list[str] = []
MISTAKES = "Mistakes, a ValueError before anything is trained"


def behavior(name: str, run: Callable[[Fit], Seen] | None = None, **how: str) -> Any:
    """A row of the last of AREAS; without `run`, a decorator of the function that is it."""
    if run is None:
        return functools.partial(behavior, name, **how)
    BEHAVIORS.append(Behavior(AREAS[-1], name, run, **how))
    return run


def row(name: str, *, holds: str = SAME, note: str = "", refusal: str = "", **arguments: Any) -> None:
    """A row of one call of fit; what TensorFlow makes is given by functions, as importing this must not start it."""

    def run(fit: Fit) -> Seen:
        keras.utils.set_random_seed(3)
        made = {key: value() if callable(value) else value for key, value in arguments.items()}
        return simply(fit, made.pop("x", X), made.pop("y", Y), **made)

    behavior(name, run, holds=holds, note=note, refusal=refusal)


def mistake(name: str, refusal: str, **arguments: Any) -> None:
    row(name, holds=REFUSED, refusal=refusal, **arguments)


# Models


def classifier(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(3, activation="softmax")(keras.layers.Dense(5, activation="tanh")(inputs))
    return compiled_as(keras.Model(inputs, outputs), **compiled)


def out(**settings: Any) -> keras.layers.Layer:
    return keras.layers.Dense(3, activation="softmax", **settings)


def layered(layers: list[Any], **compiled: Any) -> keras.Model:
    return compiled_as(keras.Sequential(layers), **compiled)


def compiled_as(model: keras.Model, **compiled: Any) -> keras.Model:
    settings = {"optimizer": keras.optimizers.Adam(0.01), "loss": CROSSENTROPY}
    model.compile(**settings | {"metrics": ["accuracy"]} | compiled)
    return model


@keras.saving.register_keras_serializable("behaviors")
class Subclassed(keras.Model):
    """Not built before it sees data."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


@keras.saving.register_keras_serializable("behaviors")
class Around(keras.Model):
    """Calls another model."""

    def __init__(self, inner: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"inner": keras.saving.serialize_keras_object(self.inner)}


class Drawing(keras.Model):
    """Makes its weights when it is called, with seeds that it draws then."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 3), initializer="glorot_normal")

    def call(self, x: Any) -> Any:
        return keras.ops.softmax(x @ self.kernel)


class Scaled(keras.metrics.Mean):
    def __init__(self, scale: float = 1.0, shift: float = 0.0, name: str = "scaled") -> None:
        super().__init__(name)
        self._scale, self._by = scale, shift

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        super().update_state(p * self._scale + self._by)


class Reported(Subclassed):
    """Has a layer that measures, and adds to what the metrics give."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = Measuring(5)

    def get_metrics_result(self) -> dict[str, Any]:
        found = super().get_metrics_result()
        return found | {"twice": 2 * found["accuracy"]}


class Measuring(keras.layers.Dense):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        found = super().call(x)
        self.size.update_state(keras.ops.abs(found))
        return found


class Halving(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(gradient / 2, variable) for gradient, variable in grads_and_vars])


class Called(keras.losses.MeanSquaredError):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 2 * super().__call__(y_true, y_pred, sample_weight)


class Looped(Subclassed):
    def make_train_function(self, force: bool = False) -> Any:
        return super().make_train_function(force)


def power_of_gap(y: Any, p: Any, power: int) -> Any:
    return keras.ops.mean(keras.ops.abs(y - p) ** power, axis=-1)


class Prepared(Subclassed):
    """Prepares its data itself, as KerasHub's models do."""

    preprocessor: Any = staticmethod(lambda x: x / 100)

    def fit(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().fit(x if self.preprocessor is None else self.preprocessor(x), *args, **kwargs)


def two_inputs(names: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((2,), name="left"), keras.Input((2,), name="right")]
    hidden = keras.layers.Dense(5, activation="tanh")(keras.layers.Concatenate()(inputs))
    outputs = keras.layers.Dense(3, activation="softmax")(hidden)
    given = dict(zip(("left", "right"), inputs, strict=True)) if names else inputs
    return compiled_as(keras.Model(given, outputs))


def two_outputs(names: bool = False, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    kind = keras.layers.Dense(3, activation="softmax", name="kind")(inputs)
    size = keras.layers.Dense(1, name="size")(inputs)
    losses = ["sparse_categorical_crossentropy", "mse"]
    outputs = {"kind": kind, "size": size} if names else [kind, size]
    if names:
        losses = dict(zip(("kind", "size"), losses, strict=True))
    model = keras.Model(inputs, outputs)
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": losses} | compiled)
    return model


def ragged() -> tf.data.Dataset:
    rows = tf.RaggedTensor.from_row_lengths(np.arange(100, dtype=np.float32), [2] * 50)
    return tf.data.Dataset.from_tensor_slices((rows, Y)).batch(5)


def by_position() -> keras.Model:
    return compiled_as(keras.Sequential([keras.Input((4, 1)), keras.layers.Dense(3, activation="softmax")]))


def itself() -> keras.Model:
    class Codes(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.code = keras.layers.Dense(4)

        def call(self, x: Any) -> Any:
            decoded = self.code(x)
            self.add_loss(keras.ops.mean(keras.ops.square(x - decoded)))
            return decoded

    keras.utils.set_random_seed(3)
    model = Codes()
    model.compile("sgd")
    return model


def with_optional_input() -> keras.Model:
    keras.utils.set_random_seed(1)
    needed, optional = keras.Input((4,), name="needed"), keras.Input((4,), name="optional", optional=True)
    model = keras.Model({"needed": needed, "optional": optional}, AddIfGiven()(needed, optional))
    model.compile("sgd", "mse")
    return model


class AddIfGiven(keras.layers.Layer):
    def call(self, x: Any, other: Any = None) -> Any:
        return x if other is None else x + other


# What is seen


def seen(model: keras.Model, history: keras.callbacks.History, **more: Any) -> Seen:
    return {
        "history": history.history,
        "is the model's": history is model.history,
        "epochs": history.epoch,
        "weights": [np.asarray(w) for w in model.get_weights()],
        "optimizer": [np.asarray(v) for v in model.optimizer.variables],
    } | more


def simply(fit: Fit, *args: Any, model: keras.Model | None = None, **kwargs: Any) -> Seen:
    model = model or classifier()
    return seen(model, fit(model, *args, **{"shuffle": False} | kwargs))


def batches(count: int | None = None) -> Iterator[Any]:
    index = 0
    while count is None or index < count:
        begin = index % 5 * 10
        yield X[begin : begin + 10], Y[begin : begin + 10]
        index += 1


def dataset(size: int = 13) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


class Numbered(keras.utils.PyDataset):
    """Four batches; counts what it was asked."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.order = np.arange(50)

    @property
    def num_batches(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * 13 : index * 13 + 13]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.order = self.order[::-1]


class Shrinking(Numbered):
    """Has fewer rows after each pass."""

    def on_epoch_end(self) -> None:
        self.order = self.order[:-3]


class Endless(Numbered):
    @property
    def num_batches(self) -> None:
        return None

    def on_epoch_end(self) -> None:
        pass

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % 4)


AREAS.append("Data")
row("arrays with a smaller last batch", epochs=3)
row("a feature in an array of one axis", x=X[:, 0], model=lambda: layered([keras.Input((1,)), out()]))
row("TensorFlow tensors", x=lambda: tf.constant(X), y=lambda: tf.constant(Y))
row("float64, integers, booleans", x=lambda: X.astype(np.float64) > 0, y=lambda: Y.astype(np.int8), batch_size=20)
row(
    "a dict of inputs",
    x=lambda: dict(zip(("left", "right"), HALVES, strict=True)),
    model=lambda: two_inputs(names=True),
)


@behavior("an output without a loss")
def _(fit: Fit) -> Seen:
    listed, named = [Y, X[:, :1]], {"kind": Y, "size": X[:, :1]}
    compiled = {"loss": [CROSSENTROPY, None], "metrics": [[], ["mae"]], "loss_weights": [0.5, 0.0]}
    by_name = {"loss": {"size": "mse"}, "metrics": {"kind": ["accuracy"]}}
    subclassed = compiled_as(Around(two_outputs(names=True)), loss={"kind": None, "size": "mse"}, metrics=None)
    calls = [
        (two_outputs(loss=[CROSSENTROPY, None]), listed, None),
        (two_outputs(loss=[None, "mse"]), listed, [WEIGHTS, WEIGHTS]),
        (two_outputs(**compiled), listed, None),
        (two_outputs(names=True, **by_name), named, None),
        (subclassed, named, {"kind": WEIGHTS, "size": WEIGHTS}),
    ]
    return [simply(fit, X, y, sample_weight=w, model=model, batch_size=10) for model, y, w in calls]


row(
    "targets of the only output with a loss",
    y=X[:, :1],
    model=lambda: two_outputs(loss=[None, "mse"]),
    validation_data=(X, X[:, :1]),
    batch_size=10,
)
row(
    "x without its last axis of length 1",
    model=lambda: layered([keras.Input((4, 1)), keras.layers.Conv1D(2, 3), keras.layers.Flatten(), out()]),
)
row(
    "a loss with reduction='none' beside losses of other outputs",
    holds=REFUSED,
    note="fit adds the others to each value. Write reduction='sum'",
    refusal="reduction='none' beside losses of other outputs",
    y=[Y, X[:, :1]],
    model=lambda: two_outputs(loss=[CROSSENTROPY, keras.losses.MeanSquaredError(reduction="none")]),
)
row(
    "outputs in a list with losses in a dict of another order",
    y=[Y, X[:, :1]],
    model=lambda: two_outputs(loss={"size": "mse", "kind": CROSSENTROPY}),
    batch_size=10,
)
row(
    "a dict of outputs with loss weights and metrics",
    y={"kind": Y, "size": X[:, :1]},
    model=lambda: two_outputs(names=True, loss_weights={"kind": 1.0, "size": 0.3}, metrics={"kind": ["accuracy"]}),
    batch_size=10,
)


@behavior("lists of losses, loss weights and metrics for outputs in a dict")
def _(fit: Fit) -> Seen:
    def model(layers: list[str], outputs: type[dict[str, Any]] = dict) -> keras.Model:
        inputs = keras.Input((4,))
        made = [keras.layers.Dense(1, name=name, kernel_initializer="ones")(inputs) for name in layers]
        return keras.Model(inputs, outputs(zip(("size", "kind"), made, strict=True)))

    names, metrics = ["size", "kind"], {"metrics": [["mse"], ["mae"]], "weighted_metrics": [["mape"], ["msle"]]}
    models = [model(names), model(names[::-1]), model(names, OrderedDict), Around(model(names))]
    made = [compiled_as(each, loss=["mae", "mse"], loss_weights=[1.0, 0.5], **metrics) for each in models]
    y, weights = {"size": X[:, :1], "kind": X[:, 1:2]}, {"size": WEIGHTS, "kind": WEIGHTS[::-1].copy()}
    return [simply(fit, X, y, sample_weight=weights, model=each, batch_size=10) for each in made]


@behavior("one output in a dict")
def _(fit: Fit) -> Seen:
    found = []
    for is_dict in (True, False):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        kind = keras.layers.Dense(3, activation="softmax", name="kind")(inputs)
        model = keras.Model(inputs, {"kind": kind} if is_dict else kind)
        by_name = {"loss": {"kind": "sparse_categorical_crossentropy"}, "loss_weights": {"kind": 0.5}}
        compiled_as(model, metrics={"kind": ["accuracy"]}, **by_name)
        weights = {"kind": WEIGHTS} if is_dict else WEIGHTS
        found.append(simply(fit, X, {"kind": Y} if is_dict else Y, sample_weight=weights, model=model))
    return found


row(
    "the losses of several outputs, where the last batch is smaller",
    holds=DIFFERS,
    note="each is the mean over the examples, in fit over the batches; the total is the same",
    y=[Y, X[:, :1]],
    model=two_outputs,
)
row("a batched tf.data.Dataset", x=dataset, y=None, epochs=2)
row(
    "a tf.data.Dataset without end, with steps_per_epoch",
    x=lambda: dataset(10).repeat(),
    y=None,
    epochs=2,
    steps_per_epoch=3,
)
row(
    "a tf.data.Dataset that shuffles by a seed",
    holds=DIFFERS,
    note="begins with the first batch; fit draws that beforehand",
    x=lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=3).batch(10),
    y=None,
    epochs=2,
)
row(
    "a tf.data.Dataset that does not know its length",
    holds=DIFFERS,
    note="reads it once to count, with a warning; fit's optimizer counts one update too many",
    x=lambda: tf.data.Dataset.from_generator(lambda: batches(4), output_signature=dataset(10).element_spec),
    y=None,
    epochs=2,
)
row(
    "a tf.data.Dataset of (x, y, sample_weight)",
    x=lambda: tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(13),
    y=None,
    epochs=2,
)
row("a generator with steps_per_epoch", x=batches, y=None, epochs=3, steps_per_epoch=3)


@behavior("a generator that ends, without steps_per_epoch", note="in memory, with a warning")
def _(fit: Fit) -> Seen:
    found = simply(fit, batches(5))
    return {name: found[name] for name in ("history", "weights")}


row(
    "a generator that ends, without steps_per_epoch, in several epochs",
    holds=DIFFERS,
    note="every epoch has the batches; in fit only the first has",
    x=lambda: batches(5),
    y=None,
    epochs=2,
)
row("a keras.utils.PyDataset, with its on_epoch_end", x=Numbered, y=None, epochs=3)
row("a PyDataset without end, with several workers", x=lambda: Endless(workers=2), y=None, epochs=2, steps_per_epoch=3)
row("ragged tensors", holds=REFUSED, note="pad them", refusal="dense tensors", x=ragged, y=None)
row(
    "None for an input that is optional",
    holds=REFUSED,
    note="give it values, or build the model without it",
    refusal="None for an input of the model",
    x={"needed": X, "optional": None},
    y=X,
    model=with_optional_input,
)
row(
    "a tf.data.Dataset of single examples",
    holds=REFUSED,
    note="batch it, as for fit",
    refusal=r"fit takes batches. Write dataset\.batch\(32\)",
    x=lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
    y=None,
)
row("x alone, for a model that adds its loss itself", y=None, model=itself)
row("y, for a model that adds its loss itself", model=itself)


AREAS.append("Weights of examples")
row("sample_weight", sample_weight=WEIGHTS, epochs=2)
row(
    "a metric in metrics and weighted_metrics",
    sample_weight=WEIGHTS,
    model=lambda: classifier(metrics=["accuracy"] * 2, weighted_metrics=["accuracy"]),
    validation_data=(X, Y, WEIGHTS),
)
row(
    "a list of sample_weight, by output",
    y=[Y, X[:, :1]],
    sample_weight=lambda: [WEIGHTS, WEIGHTS[::-1].copy()],
    model=two_outputs,
    batch_size=10,
)


@behavior("a mask, with metrics, weighted metrics and a sample_weight of each step")
def _(fit: Fit) -> Seen:
    tokens, y = np.abs(X * 3).astype(np.int32) % 4, (X > 0).astype(np.float32)
    metrics: dict[str, Any] = {"metrics": ["mae", "AUC"], "weighted_metrics": ["mse", "AUC"]}
    found = []
    for weights in (None, np.tile(WEIGHTS[:, np.newaxis, np.newaxis], (4, 1))):
        for xla in ("off", "on") if fit.__name__ == "by_tfdist" else ("", ""):
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Embedding(4, 2, mask_zero=True), keras.layers.Dense(1, "sigmoid")]
            model = layered([keras.Input((4,)), *layers], optimizer="sgd", loss="mse", **metrics)
            how = {"xla": xla} if xla else {}
            found.append(simply(fit, tokens, y[..., np.newaxis], model=model, sample_weight=weights, **how))
    return found


row("class_weight", class_weight={0: 2.0, 1: 0.5}, epochs=2)
row(
    "class_weight with a tf.data.Dataset",
    note="a class without a weight weighs 1",
    x=dataset,
    y=None,
    class_weight={0: 2.0, 1: 0.5, 2: 1.0},
)
row("class_weight with a PyDataset", x=Numbered, y=None, class_weight={0: 2.0, 1: 0.5})


AREAS.append("Epochs, steps, validation")


@behavior("epochs up to initial_epoch")
def _(fit: Fit) -> Seen:
    found = simply(fit, X, Y, epochs=2, initial_epoch=2)
    return {name: found[name] for name in ("history", "epochs", "weights")}


row("steps_per_epoch that divides the batches", batch_size=5, epochs=4, steps_per_epoch=5)
row("steps_per_epoch without batch_size", epochs=2, steps_per_epoch=3)
row("steps_per_epoch beyond the batches, with a warning", batch_size=10, epochs=2, steps_per_epoch=7)
row(
    "steps_per_epoch that does not divide the batches",
    holds=DIFFERS,
    note="every epoch has its steps; in fit every second one ends with the pass",
    batch_size=10,
    epochs=3,
    steps_per_epoch=4,
)


@behavior("set_max_epochs and set_max_steps_per_epoch")
def _(fit: Fit) -> Seen:
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        return simply(fit, X, Y, batch_size=5, epochs=4)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)


row(
    "arrays with weights and validation_batch_size",
    validation_data=(X[:20], Y[:20], WEIGHTS[:20]),
    validation_batch_size=20,
)
row("a list [x, y] with validation_steps", epochs=2, batch_size=8, validation_data=[X[:20], Y[:20]], validation_steps=2)
row("a tf.data.Dataset with validation_steps", epochs=2, validation_data=dataset, validation_steps=2)
row("a PyDataset to validate on", epochs=2, validation_data=Numbered)
row(
    "validation_data: a PyDataset that changes in on_epoch_end",
    holds=DIFFERS,
    note="called once a pass; fit calls it twice",
    epochs=3,
    validation_data=Shrinking,
)
row("a generator with validation_steps, in one epoch", validation_data=batches, validation_steps=2)
row(
    "validation_data: a generator, in several epochs",
    holds=DIFFERS,
    note="the generator continues; fit begins again with its first two batches",
    epochs=2,
    validation_data=batches,
    validation_steps=3,
)
row("validation_split", epochs=2, validation_split=0.3)
row(
    "validation_split of a list of inputs with sample_weight",
    x=lambda: list(HALVES),
    sample_weight=WEIGHTS,
    validation_split=0.2,
    model=two_inputs,
)
row(
    "NumPy's numbers",
    **dict.fromkeys(["epochs", "steps_per_epoch", "validation_steps", "validation_batch_size"], np.int64(2)),
    batch_size=np.int32(10),
    initial_epoch=np.int32(0),
    validation_split=np.float32(0.25),
    validation_freq=[np.int64(2)],
    class_weight={np.int64(0): np.float64(2.0)},
)
row("validation_freq as a list of epochs", epochs=4, validation_data=(X, Y), validation_freq=[1, 3])
row(
    "shuffle=True",
    holds=DIFFERS,
    note="another order, the same for any strategy and number of workers",
    epochs=2,
    shuffle=True,
)


AREAS.append("Callbacks")


@behavior("a metric of several numbers")
def _(fit: Fit) -> Seen:
    means: list[float] = []
    notes = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: means.append(logs["val_f1_score"].mean()))
    scores = [keras.metrics.F1Score(average=None, name="f1_score")]
    model, labels = classifier(loss="categorical_crossentropy", metrics=scores), np.eye(3, dtype=np.float32)[Y]
    return simply(fit, X, labels, model=model, epochs=2, validation_data=(X, labels), callbacks=notes), means


@behavior("hooks of batches, with steps_per_execution", holds=DIFFERS, note="called for every batch")
def _(fit: Fit) -> Seen:
    spy = BatchSpy()
    model = classifier(steps_per_execution=3)
    return simply(fit, X, Y, model=model, batch_size=9, callbacks=spy) | {"calls": spy.calls}


@behavior("stop_training, set within an epoch that validation_freq leaves out")
def _(fit: Fit) -> Seen:
    model = classifier()

    def stop(batch: int, logs: Any) -> None:
        model.stop_training = batch == 1

    stopping = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    return simply(fit, X, Y, epochs=2, validation_data=(X, Y), validation_freq=2, callbacks=stopping, model=model)


@behavior("what a callback adds to logs")
def _(fit: Fit) -> Seen:
    def add(epoch: int, logs: dict[str, Any]) -> None:
        logs["mine"] = epoch * 2.0

    return simply(fit, X, Y, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=add)])


behavior("exceptions of callbacks", lambda fit: interrupted(fit, KeyError("mine")))
behavior("KeyboardInterrupt", lambda fit: interrupted(fit, KeyboardInterrupt()))


def interrupted(fit: Fit, error: BaseException) -> Seen:
    model = classifier()

    def fail(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise error

    try:
        fit(model, X, Y, epochs=3, shuffle=False, callbacks=keras.callbacks.LambdaCallback(on_epoch_end=fail))
    except type(error) as raised:
        return {"same": raised is error, "weights": model.get_weights(), "evaluated": model.evaluate(X, Y, verbose=0)}
    return None


AREAS.append("The model")


@behavior("a second call, and the model's own fit afterwards")
def _(fit: Fit) -> Seen:
    model = classifier()
    fit(model, X, Y, shuffle=False)
    again = simply(fit, X, Y, epochs=2, model=model)
    return again, seen(model, model.fit(X, Y, shuffle=False, verbose=0))


@behavior("evaluate, predict and the names of metrics afterwards")
def _(fit: Fit) -> Seen:
    model, y = two_outputs(metrics=[["accuracy"], ["mae"]]), [Y, X[:, :1]]
    fit(model, X, y, shuffle=False, validation_data=(X, y))
    names = [model.metrics_names, [metric.name for metric in model.metrics], model.loss, model.compiled]
    names.append([metric.name for metric in model.metrics[1].metrics])
    return [names, model.evaluate(X, y, verbose=0, return_dict=True), model.predict(X, verbose=0), model.metrics_names]


@behavior("get_metrics_result afterwards", holds=DIFFERS, note="the metrics are empty; the History has the results")
def _(fit: Fit) -> Seen:
    model = classifier()
    fit(model, X, Y, shuffle=False)
    return model.get_metrics_result()


@behavior("compile again between two calls")
def _(fit: Fit) -> Seen:
    model = classifier()
    fit(model, X, Y, shuffle=False)
    return simply(fit, X, Y, model=compiled_as(model, optimizer="sgd", metrics=["sparse_top_k_categorical_accuracy"]))


row("a subclassed model that is not built", epochs=2, model=lambda: compiled_as(Subclassed()), validation_data=(X, Y))


@behavior("a subclassed model of several outputs in a dict")
def _(fit: Fit) -> Seen:
    losses = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
    model = Around(two_outputs(names=True))
    model.compile("sgd", losses, metrics={"kind": ["accuracy"], "size": ["mae"]})
    return simply(fit, X, {"kind": Y, "size": X[:, :1]}, model=model, batch_size=10)


@behavior(
    "a subclassed model of several outputs, as a list",
    holds=REFUSED,
    note="return a dict, which names them",
    refusal="outputs without names. Return a dict",
)
def _(fit: Fit) -> Seen:
    model = Around(two_outputs())
    model.compile("sgd", ["sparse_categorical_crossentropy", "mse"])
    return simply(fit, X, [Y, X[:, :1]], model=model, batch_size=10)


row("a Sequential model that is not built", epochs=2, model=lambda: layered([out()]))


@behavior("names in compile; your own loss")
def _(fit: Fit) -> Seen:
    def gap(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    keras.utils.set_random_seed(3)
    model = compiled_as(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), loss=gap, metrics=["mse", "mae"])
    return simply(fit, X, X[:, :1], model=model)


row(
    "metrics whose configuration leaves arguments out",
    y=np.eye(3)[Y],
    model=lambda: classifier(
        loss="mse",
        metrics=[
            Scaled(3.0),
            keras.metrics.CosineSimilarity(axis=0),
            keras.metrics.MeanMetricWrapper(power_of_gap, "gap", power=2),
        ],
    ),
)


@behavior("a loss function that averages over rows")
def _(fit: Fit) -> Seen:
    def gap(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=0)

    losses = [gap, lambda y, p: keras.ops.reshape(keras.ops.square(y - p), [-1])]  # and of another number of values
    found = [simply(fit, X, np.eye(3)[Y], model=classifier(loss=loss), batch_size=10) for loss in losses]
    keras.utils.set_random_seed(3)
    model = compiled_as(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), loss=gap, metrics=None)
    return found, simply(fit, X, X[:, :1], sample_weight=WEIGHTS, model=model, batch_size=10)


row(
    "get_metrics_result, and metrics of layers", model=lambda: compiled_as(Reported()), validation_data=(X[:20], Y[:20])
)
row("an optimizer's apply_gradients", epochs=2, model=lambda: classifier(optimizer=Halving(0.1)))
row("seeds of weights that the call creates", model=lambda: compiled_as(Drawing()))
row(
    "an Embedding under an optimizer with a state, such as Adam",
    holds=DIFFERS,
    note="adds up the gradients of a repeated row first",
    x=Y[:, np.newaxis],
    epochs=3,
    model=lambda: layered(
        [keras.Input((1,), dtype="int32"), keras.layers.Embedding(3, 2), keras.layers.Flatten(), out()]
    ),
)


@behavior("the model's own fit, which prepares the data, such as KerasHub's")
def _(fit: Fit) -> Seen:
    keras.utils.set_random_seed(1)
    return simply(fit, X, Y, model=compiled_as(Prepared()), validation_data=(X[:20], Y[:20]))


row(
    "a model without weights to train",
    holds=REFUSED,
    note="call model.fit",
    refusal="nothing would be learned",
    y=X,
    model=lambda: layered([keras.Input((4,)), keras.layers.ActivityRegularization(0.1)], loss="mse", metrics=None),
)


@behavior("learning rate schedules, clipping, weight decay, moving averages")
def _(fit: Fit) -> Seen:
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
    adam = keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=0.5, use_ema=True, ema_momentum=0.9)
    return simply(fit, X, Y, epochs=3, model=classifier(optimizer=adam))


row(
    "dropout and batch normalization",
    epochs=2,
    model=lambda: layered(
        [keras.Input((4,)), keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dropout(0.4), out()]
    ),
)
row(
    "frozen layers and regularization",
    epochs=2,
    model=lambda: layered([keras.Input((4,)), keras.layers.Dense(6, trainable=False), out(kernel_regularizer="l2")]),
)


@behavior("mixed_float16: computed with a loss scale", holds=DIFFERS, note="the scale is tfdist's own")
def _(fit: Fit) -> Seen:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = classifier()
    finally:
        keras.config.set_dtype_policy(policy)
    return simply(fit, X, Y, epochs=2, model=model)


@behavior("dtype policy and random generators")
def _(fit: Fit) -> Seen:
    model = classifier()
    keras.utils.set_random_seed(11)
    fit(model, X, Y, shuffle=False)
    return [keras.config.dtype_policy().name, np.random.random(3)]


row(
    "run_eagerly=True",
    holds=REFUSED,
    note="steps are always compiled. Debug with model.fit",
    refusal="run_eagerly",
    model=lambda: classifier(run_eagerly=True),
)
row("a loss that is not finite", holds=REFUSED, note="ends with DivergedError", refusal="not finite", x=X * np.nan)


AREAS.append(MISTAKES)
mistake("a model that is not compiled", "Call model.compile", model=lambda: keras.Sequential([keras.layers.Dense(3)]))
mistake("a misspelt argument", r"Did you mean 'epochs'\? \[unknown-setting\]$", epoch=2)
mistake(
    "a loss's own __call__",
    r"Called, which has a __call__ of its own \(.*behaviors\.py",
    model=lambda: classifier(loss=Called()),
)
mistake("make_train_function", "Looped has a make_train_function of its own", model=lambda: compiled_as(Looped()))
mistake("a metric without get_config", r"get_config .* shift", model=lambda: classifier(metrics=[Scaled(1, 2)]))
mistake("no targets", r"the data gives no y\. Give y\.$", y=None)
mistake("sharding, which experiments have", "'sharding', which neither", sharding="optimizer")
mistake("x and y of different lengths", "same number of samples", y=Y[:20])
mistake("class_weight and sample_weight", "at the same time", class_weight={0: 1.0}, sample_weight=WEIGHTS)
mistake(
    "class_weight with a class for each of several positions",
    r"targets, of shape \[None, 4\], hold a class for each position",
    x=X[..., np.newaxis],
    y=np.tile(Y[:, np.newaxis], 4),
    model=by_position,
    class_weight={0: 2.0},
)
mistake("class_weight with several outputs", "single output", y=[Y, Y], model=None, class_weight={0: 1.0})
mistake("a validation_split that leaves no examples", "not sufficient to split", validation_split=0.999)
mistake("validation_split with a dataset", "only supported for tensors", x=dataset, y=None, validation_split=0.2)
mistake("targets beside a dataset", "should not be passed", x=dataset)
mistake("a dataset without end, without steps_per_epoch", "has no end", x=lambda: dataset().repeat(), y=None)
mistake("a generator that gives nothing", "no batch", x=lambda: batches(0), y=None)
mistake(
    "a validation dataset without a batch",
    "validation_data holds no batch",
    validation_data=lambda: dataset().filter(lambda x, y: False),
)
mistake("steps_per_epoch = 0", "steps_per_epoch is 0", steps_per_epoch=0)
mistake("something that is no data", "Unrecognized data type", x=3, y=None)
mistake(
    "a callback that monitors a metric of several numbers",
    "EarlyStopping monitors 'f1_score', which gives 3 numbers",
    y=lambda: np.eye(3, dtype=np.float32)[Y],
    model=lambda: classifier(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1_score")]),
    callbacks=keras.callbacks.EarlyStopping("f1_score"),
)
mistake(
    "a callback that monitors an evaluation that there is not",
    "Write validation_data, or",
    callbacks=keras.callbacks.EarlyStopping("val_acc"),
)
mistake("something that is no callback", "no keras.callbacks.Callback", callbacks=[3])
mistake("global_batch_size, which experiments have", "takes. Did you mean 'batch_size'", global_batch_size=8)
mistake("eval_every, which experiments have", "takes. Did you mean 'validation_freq'", eval_every=2)
mistake("validation_freq as a text", "validation_freq is '2 steps'; write .*of epochs. ", validation_freq="2 steps")
mistake("a run_dir that is no path", "run_dir is 5; write a path", run_dir=5)
mistake("no data", "x is None; write arrays", x=None, y=None)
mistake("no examples", "x holds no examples", x=X[:0], y=Y[:0])
mistake("a sparse matrix", r"x is sparse; write x\.toarray\(\)", x=lambda: sparse.csr_matrix(X))
mistake("a ragged tensor", r"x is a RaggedTensor; write x\.to_tensor", x=lambda: tf.RaggedTensor.from_tensor(X), y=Y)
mistake("class_weight as a list", r"class_weight is \[1, 2\]; write a dict", class_weight=[1, 2])
mistake("a set's name with a space", "a set of validation_data is 'a b'; write", validation_data={"a b": (X, Y)})


def table() -> str:
    """The table of docs/fit.md: what differs and what is refused, then how much is the same; no mistakes."""
    lines = ["| in `model.fit` | in `tfdist.fit` |", "|---|---|"]
    num_same = 0
    for area, behaviors in _by_area():
        others = [each for each in behaviors if each.holds != SAME]
        lines += [f"| **{area}** | |"] if others else []
        lines += [f"| {each.name} | {each.holds}: {each.note} |" for each in others]
        num_same += sum(each.holds == SAME for each in behaviors)
    return (
        "\n".join([*lines, "", f"The other {num_same} behaviors of `tests/keras_fit/behaviors.py` are the same."])
        + "\n"
    )


def _by_area() -> list[tuple[str, list[Behavior]]]:
    areas = itertools.groupby(BEHAVIORS, lambda each: each.area)
    return [(area, list(those)) for area, those in areas if area != MISTAKES]


if __name__ == "__main__":
    print(table(), end="")
