"""What a training step costs beside a hand-written loop and beside `keras.Model.fit`.

On one device tfdist's step is divided by a `tf.range` loop inside one `tf.function`, with the same number of steps a
call and the same work, and by `fit`; under MirroredStrategy with two logical CPU devices by the same two under that
strategy. One strategy a process; within it the samples are interleaved. Takes under two minutes.

    python benchmarks/step.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples, time_call
from trainings import Train, build_fit, build_handwritten, build_training
from workloads import Workload, mlp

from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy
from tfdist.training.loop.boundaries import Pace

PARTS = ("one_device", "mirrored")
LOOP_ROUNDS = 40
FIT_ROUNDS = 15

SMALL = mlp("small", num_features=64, hidden_units=(64, 64), batch=64, num_examples=64 * 256)
MEDIUM = mlp("medium", num_features=256, hidden_units=(512, 512), batch=128, num_examples=128 * 256)


def measure(parts: Sequence[str]) -> list[Figure]:
    return [figure for part in parts for figure in measure_part("step", part)]


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
