"""Models of Keras and keras.applications under `tfdist.fit` beside `keras.Model.fit`: their steps and first epochs.

A sample builds, compiles and trains a model anew for three epochs: the first is timed from the call, with all that is
traced and compiled in it; the speed is that of the other two. One model a process. Takes an hour or more on two cores.

    python benchmarks/models.py [--rounds=N] [--json=FILE]
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples
from sizes import NUM_CLASSES, ONE_DEVICE
from workloads import Workload, build_workload, layers, loss, metric, optimizer

import tfdist

EPOCHS = 3
# By name: examples of an epoch, the shape of one, the number of tokens or 0, and what makes the layers.
LAYERS: dict[str, tuple[int, tuple[int, ...], int, Callable[[], list[keras.Layer]]]] = {
    "large embedding": (1600, (32,), 10**6, lambda: [layers.Embedding(10**6, 64), layers.GlobalMaxPooling1D()]),
    "GRU": (1024, (64, 32), 0, lambda: [layers.GRU(128)]),
    "bidirectional LSTM": (1024, (64, 32), 0, lambda: [layers.Bidirectional(layers.LSTM(64))]),
    "masked LSTM": (1024, (64,), 9999, lambda: [layers.Embedding(9999, 32, mask_zero=True), layers.LSTM(64)]),
    "signals": (4096, (512, 8), 0, lambda: [layers.Conv1D(64, 9, 4), layers.BatchNormalization(), layers.ReLU()]),
    "separable": (1024, (64, 64, 3), 0, lambda: [layers.SeparableConv2D(64, 3, 2), layers.LayerNormalization()]),
    "hourglass": (1024, (32, 32, 3), 0, lambda: [layers.Conv2D(32, 4, 2), layers.Conv2DTranspose(16, 4, 2)]),
}
APPLICATIONS = {  # with examples of 64 × 64 pixels an epoch, in batches of 16
    **dict.fromkeys(("VGG16", "EfficientNetB0", "DenseNet121", "ConvNeXtTiny", "EfficientNetV2B0"), 96),
    **dict.fromkeys(("MobileNet", "MobileNetV2", "MobileNetV3Small", "ResNet50", "ResNet50V2"), 160),
}


def measure(*, rounds: int) -> Iterator[list[Figure]]:
    names = choose_size([*ONE_DEVICE, *LAYERS, *APPLICATIONS], ["small MLP", "VGG16"])
    return (measure_part("models", "compare_with_fit", name, rounds) for name in names)


def compare_with_fit(name: str, rounds: str) -> list[Figure]:
    workload = build_workload(name, ONE_DEVICE[name]) if name in ONE_DEVICE else build_other(name)
    both = [functools.partial(time_epochs, workload, fit) for fit in (tfdist.fit, keras.Model.fit)]
    ours, theirs = take_samples(both, int(rounds))
    (first, rate), (first_of_fit, rate_of_fit) = zip(*ours, strict=True), zip(*theirs, strict=True)
    return [
        make_ratio(f"{name}: tfdist.fit ÷ fit", rate, rate_of_fit, 1.0),
        make_ratio(f"{name}: first epoch ÷ fit's", first, first_of_fit, 1.0, unit="s", at_most=True),
    ]


def build_other(name: str) -> Workload:
    if name in APPLICATIONS:
        pixels, build = (64, 64, 3), getattr(keras.applications, name)
        size = {"weights": None, "input_shape": pixels, "classes": NUM_CLASSES, "classifier_activation": None}
        few = choose_size(16, 2)
        return Workload(name, functools.partial(build, **size), pixels, few, choose_size(APPLICATIONS[name], 2 * few))
    examples, shape, vocabulary, make = LAYERS[name]

    def build_layers() -> keras.Model:
        inputs = keras.Input(shape, dtype="int32" if vocabulary else "float32")
        return keras.Sequential([inputs, *make(), layers.Flatten(), layers.Dense(NUM_CLASSES)])

    return Workload(name, build_layers, shape, 64, examples, vocabulary)


def time_epochs(workload: Workload, fit: Callable[..., object]) -> tuple[float, float]:
    """The seconds of the first epoch, and the steps of the others a second."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = workload.build_model()
    model.compile(optimizer(), loss(), metrics=[metric()])
    x, y = workload.arrays()
    ends: list[float] = []
    tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    batch = workload.global_batch_size
    started = time.perf_counter()
    fit(model, x, y, batch_size=batch, epochs=EPOCHS, verbose=0, callbacks=[tell])
    tf.compat.v1.reset_default_graph()
    steps = -(-len(x) // batch) * (EPOCHS - 1)
    return ends[0] - started, steps / (ends[-1] - ends[0])


if __name__ == "__main__":
    report(__doc__, measure, numbers={"rounds": 3})
