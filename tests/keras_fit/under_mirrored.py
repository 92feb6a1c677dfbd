"""What `tfdist.fit` does with models of a strategy's scope, in a process of its own: prints "all the same"."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import pytest
import tensorflow as tf
from fuzz.fit_parts import Batches
from keras_fit.behaviors import Subclassed, X, Y, classifier, compiled_as, dataset, seen
from keras_fit.test_behaviors import differences
from keras_fit.test_fit import check_that_fit_leaves_objects_as_they_were, counting
from unequal_experiments import Largest

import tfdist
from tfdist.strategies.mirrored import Mirrored


def trained(fit: Any, *args: Any, scope: Any, model: Any = classifier, **kwargs: Any) -> Any:
    with scope:
        made = model()
    found = seen(made, fit(made, *args, **{"shuffle": False, "verbose": 0, "epochs": 2} | kwargs))
    return {"history": found["history"], "weights": found["weights"], "evaluated": made.evaluate(X, Y, verbose=0)}


def subclassed() -> keras.Model:
    keras.utils.set_random_seed(3)
    return compiled_as(Subclassed())


def of_the_batch(y_true: Any, y_pred: Any) -> Any:
    """Asks for logits and gets probabilities, in whose place Keras takes the logits that they are made of."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


def by_column(y_true: Any, y_pred: Any) -> Any:
    labels = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(y_true, [-1]), "int32"), 3)
    return keras.ops.mean(keras.ops.abs(labels - y_pred), axis=0)


def of_batches(fit: Any, scope: Any, loss: Any) -> Any:
    """Without the evaluation, in which Keras adds such a loss up over the replicas."""
    found = trained(fit, X, Y, scope=scope, model=functools.partial(classifier, loss=loss))
    return found["history"], found["weights"]


CASES = (
    lambda fit, scope: trained(fit, dataset(7), scope=scope, validation_data=dataset()),
    lambda fit, scope: trained(fit, X, Y, scope=scope, model=subclassed),
    lambda fit, scope: of_batches(fit, scope, of_the_batch),
    lambda fit, scope: of_batches(fit, scope, by_column),
    lambda fit, scope: of_batches(fit, scope, lambda y, p: tf.reshape(p, [-1]) ** 2),
)


def by_keras(model: keras.Model, *args: Any, **kwargs: Any) -> keras.callbacks.History:
    return model.fit(*args, **kwargs)


def differences_of_a_moved_model() -> list[str]:
    """A model that was made in no scope, evaluated and trained by fit, then trained on two devices, against fit."""
    shown = []
    for fit in (by_keras, functools.partial(tfdist.fit, strategy=Mirrored(num_cpu_devices=2))):
        model = classifier(optimizer=keras.optimizers.AdamW(0.01, use_ema=True))
        encoder = keras.Model(model.inputs, model.layers[0].output)
        encoder.predict(X, verbose=0)  # whose function keeps the model's variables
        model.fit(X, Y, shuffle=False, verbose=0)
        before = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
        histories = [fit(model, X, Y, shuffle=False, verbose=0, epochs=2).history for _ in range(2)]
        after = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
        kept = [one is other for one, other in zip(before, after, strict=True)]
        model.fit(X, Y, shuffle=False, verbose=0)
        evaluated = [model.evaluate(X, Y, verbose=0), encoder.predict(X, verbose=0), model.predict(X, verbose=0)]
        shown.append([histories, evaluated, list(model.get_weights()), [v.numpy() for v in model.optimizer.variables]])
        if not all(kept):
            return ["variables of the moved model are others afterwards"]
    return differences(*shown, "moved")


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    ours, theirs = Mirrored(num_cpu_devices=2), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    different = []
    for index, case in enumerate(CASES):
        expected = case(by_keras, contextlib.nullcontext())
        for strategy in (ours, theirs) if index == 0 else (ours,):
            found = case(tfdist.fit, strategy.scope())
            different += [f"{index} {strategy}: {each}" for each in differences(expected, found)]
    different += differences_of_a_moved_model()
    with ours.scope():
        model = classifier()
    tfdist.fit(model, X, Y, shuffle=False, verbose=0)
    model.fit(X, Y, shuffle=False, verbose=0)  # Keras's optimizer sums over the replicas again
    single = classifier()
    single.fit(X, Y, shuffle=False, epochs=2, verbose=0)
    different += differences(list(single.get_weights()), list(model.get_weights()), "fit afterwards")
    with ours.scope():
        model = counting()
    for _ in range(2):
        check_that_fit_leaves_objects_as_they_were(model)
    if (count := float(model.layers[0].count.value.numpy())) != 8.0:  # two steps a call, two replicas
        different.append(f"counted {count}")
    for error, message, data, metrics in (
        (ValueError, "Return a value for each example", (dataset(),), [lambda y, p: keras.ops.mean(p)]),
        (ValueError, "'largest' is not made of sums", (X, Y), [Largest()]),
        (LookupError, "the file of a batch is gone", (Batches((X, Y), 13, fails_at=2),), None),
    ):
        with ours.scope():
            model = classifier(metrics=metrics)
        with pytest.raises(error, match=message):
            tfdist.fit(model, *data, verbose=0)
    print("\n".join(different) or "all the same")


if __name__ == "__main__":
    main()
