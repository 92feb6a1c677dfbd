"""What a training step costs beside a hand-written loop and beside `keras.Model.fit`.

On one device tfdist's step is divided by a `tf.range` loop inside one `tf.function`, with the same number of steps a
call and the same work, and by `fit`; under MirroredStrategy with two logical CPU devices by the same two under that
strategy. A model's own train_step is divided by the same training as a task, and by `fit`. Models with dropout, under
Mirrored, are divided by themselves with each replica's own draws. One part a process; within it the samples are
interleaved. Takes some three minutes.

    python benchmarks/step.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import keras
from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples, time_call
from trainings import Train, build_fit, build_handwritten, build_own_model, build_own_training, build_training
from workloads import NUM_CLASSES, Workload, mlp

from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.training.loop.boundaries import Pace
from tfdist.training.step import gradients

PARTS = ("one_device", "mirrored", "own_step", "dropout")
LOOP_ROUNDS = 40
FIT_ROUNDS = 15

SMALL = mlp("small", num_features=64, hidden_units=(64, 64), batch=64, num_examples=64 * 256)
MEDIUM = mlp("medium", num_features=256, hidden_units=(512, 512), batch=128, num_examples=128 * 256)


def measure(parts: Sequence[str]) -> Iterator[list[Figure]]:
    return (measure_part("step", part) for part in parts)


def one_device() -> list[Figure]:
    strategy = OneDevice()
    strategy.connect()
    return [
        *compare_training(strategy, SMALL, "small", over_loop=0.98, over_fit=3.0),
        *compare_training(strategy, MEDIUM, "medium", over_loop=0.98, over_fit=1.4),
    ]


def mirrored() -> list[Figure]:
    strategy = Mirrored(num_cpu_devices=2)
    strategy.connect()
    return compare_training(strategy, SMALL, "small, Mirrored 2", over_loop=None, over_fit=5.0)


def own_step() -> list[Figure]:
    """A model's own train_step ÷ the same training as a task, and ÷ `fit`."""
    strategy = OneDevice()
    strategy.connect()
    steps = SMALL.num_examples // SMALL.global_batch_size
    own = build_own_training(strategy, SMALL)
    _, task = build_training(strategy, SMALL)
    fit = build_fit(SMALL, build_model=lambda: build_own_model(SMALL))
    ours, as_task, by_fit = take_samples([build_sample(each, steps) for each in (own, task, fit)], FIT_ROUNDS)
    return [
        make_ratio("small, own train_step ÷ the same as a task", ours, as_task, 0.98),
        make_ratio("small, own train_step: tfdist ÷ fit", ours, by_fit, 1.5),
    ]


def dropout() -> list[Figure]:
    """Random numbers drawn by place ÷ each replica's own, as TensorFlow draws them."""
    strategy = Mirrored(num_cpu_devices=2)
    strategy.connect()
    batch, examples = choose_size((64, 64 * 64), (8, 32))
    figures = []
    for name, build, shape, vocabulary in (
        ("masked transformer", build_masked_transformer, (64,), 1000),
        ("convnet", build_dropping_convnet, (32, 32, 3), 0),
    ):
        workload = Workload(name, build, shape, batch, examples, vocabulary)
        ours, peer = (build_training(strategy, workload)[1] for _ in range(2))
        steps = examples // batch
        samples = [build_sample(ours, steps)]
        with mock.patch.object(gradients, "find_rows", return_value=None):
            samples.append(build_sample(peer, steps))
        by_place, own = take_samples(samples, FIT_ROUNDS)
        figures.append(make_ratio(f"{name} with dropout, Mirrored 2: by place ÷ own", by_place, own, 0.98))
    return figures


def build_masked_transformer() -> keras.Model:
    """Two layers of attention over tokens of which some are masked, with dropout of scores and outputs."""
    inputs = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(1000, 64, mask_zero=True)(inputs)
    for _ in range(2):
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x))
        hidden = keras.layers.Dense(64)(keras.layers.Dense(256, "gelu")(x))
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(hidden))
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(keras.layers.GlobalAveragePooling1D()(x)))


def build_dropping_convnet() -> keras.Model:
    inputs = x = keras.Input((32, 32, 3))
    for width in (16, 32):
        x = keras.layers.Dropout(0.2)(keras.layers.Conv2D(width, 3, activation="relu")(x))
        x = keras.layers.MaxPooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(keras.layers.Flatten()(x)))


def compare_training(
    strategy: Strategy, workload: Workload, name: str, *, over_loop: float | None, over_fit: float
) -> list[Figure]:
    """tfdist ÷ the hand-written loop and ÷ `fit`, with these goals."""
    distribution = strategy.distribution if strategy.topology.num_replicas > 1 else None
    _, tfdist = build_training(strategy, workload, tell=print)
    steps = find_steps_per_call(strategy, tfdist)
    loop = build_handwritten(workload, distribution)
    ours, peer = take_samples([build_sample(tfdist, steps), build_sample(loop, steps)], LOOP_ROUNDS)
    figures = [make_ratio(f"{name}: tfdist ÷ hand-written loop", ours, peer, over_loop)]
    steps = workload.num_examples // workload.global_batch_size
    fit = build_fit(workload, distribution)
    ours, peer = take_samples([build_sample(tfdist, steps), build_sample(fit, steps)], FIT_ROUNDS)
    return [*figures, make_ratio(f"{name}: tfdist ÷ fit", ours, peer, over_fit)]


def build_sample(train: Train, steps: int) -> Callable[[], float]:
    """A function that takes one sample of `train`, in steps/s; what is traced first is not counted."""
    train(steps)

    return lambda: steps / time_call(train, steps)


def find_steps_per_call(strategy: Strategy, train: Train) -> int:
    """The number of steps a call that tfdist's loop would settle on."""
    pace = Pace(strategy, choose_size(None, 1))
    while not pace.settled:
        steps = pace.steps_per_call
        pace.observe(steps, time_call(train, steps))
    return pace.steps_per_call


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
