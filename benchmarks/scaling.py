"""What communication between two workers costs.

Two processes, each on a core of its own with one thread for an operation, train with communication; the same two
processes train without, at the same time, each as one device on its half of every batch. The first divided by the
second is what is left of the speed. On the dense model tfdist is also divided by a hand-written loop under
MultiWorkerMirroredStrategy, which packs all gradients into one message. Samples are interleaved. Takes three
minutes on two cores.

    python benchmarks/scaling.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from measuring import Figure, choose_size, make_ratio, measure_part, report, take_samples, time_call
from trainings import Train, build_handwritten, build_training
from workloads import Workload, convnet, deep_convnet, mlp

from tfdist.strategies.horovod import Horovod
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Strategy

PARTS = ("multi_worker", "horovod")
LAUNCH = {
    "multi_worker": ("--workers=2", "--pin_cpus"),
    "horovod": ("--workers=2", "--pin_cpus", "--launcher=horovod"),
}
SAMPLE_SECONDS = choose_size(0.3, 0.01)
ROUNDS = choose_size(21, 1)


def measure(parts: Sequence[str]) -> Iterator[list[Figure]]:
    return (measure_part("scaling", part, launch=LAUNCH[part]) for part in parts)


def dense(batch: int) -> Workload:
    return mlp(f"dense 19 MB, batch {batch}", 784, (1536, 1536, 768), batch=batch, num_examples=8192)


def conv(batch: int) -> Workload:
    return deep_convnet(f"convnet, batch {batch}", batch=batch, num_examples=2 * batch)


SHALLOW = convnet("shallow convnet", input_shape=(28, 28, 1), batch=256, num_examples=4096)
SMALL_VARIABLES = mlp("62 small variables", num_features=32, hidden_units=(32,) * 30, batch=128, num_examples=8192)
# What communication costs does not depend on the batch, so its part does: hence two of them for two models.
WITH_GOALS = (
    (conv(1024), 0.97),
    (conv(256), None),
    (SHALLOW, None),
    (dense(2048), 0.80),
    (dense(512), None),
    (SMALL_VARIABLES, 0.50),
)

FIRST_WORKLOAD = choose_size(0, -1)


def multi_worker() -> list[Figure]:
    alone, together = connect("multi_worker")
    figures = compare_all(alone, together)
    _, ours = build_training(together, dense(512))
    peer = build_handwritten(dense(512), together.distribution)
    steps = count_steps(together, ours)
    samples = take_samples([build_sample(together, ours, steps), build_sample(together, peer, steps)], ROUNDS)
    name = f"{dense(512).name}, multi_worker: tfdist ÷ default packing"
    return keep_chiefs(together, [*figures, make_ratio(name, *samples, 1.5)])


def horovod() -> list[Figure]:
    alone, together = connect("horovod")
    return keep_chiefs(together, compare_all(alone, together))


def compare_all(alone: OneDevice, together: Strategy) -> list[Figure]:
    figures = [compare_communication(alone, together, workload, goal) for workload, goal in WITH_GOALS[FIRST_WORKLOAD:]]
    return [*figures, compare_communication(alone, together, dense(512), None, reduce_precision="bfloat16")]


def connect(name: str) -> tuple[OneDevice, Strategy]:
    """One device for this worker alone, and the strategy of this name of both."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    alone = OneDevice()
    alone.connect()
    together = {"multi_worker": MultiWorker, "horovod": Horovod}[name]()
    together.connect()
    return alone, together


def compare_communication(
    alone: OneDevice, together: Strategy, workload: Workload, goal: float | None, *, reduce_precision: str | None = None
) -> Figure:
    """Training with communication, in this precision, ÷ without."""
    _, ours = build_training(together, workload, reduce_precision=reduce_precision)
    _, peer = build_training(alone, workload, share=together.topology.num_workers)
    steps = count_steps(together, ours)
    samples = take_samples([build_sample(together, ours, steps), build_sample(together, peer, steps)], ROUNDS)
    how = "with" if reduce_precision is None else f"with {reduce_precision}"
    return make_ratio(f"{workload.name}, {together.name}: {how} ÷ without communication", *samples, goal)


def build_sample(together: Strategy, train: Train, steps: int) -> Callable[[], float]:
    """A function that takes one sample of `train` in all workers at once: their mean steps/s."""
    train(steps)

    def sample() -> float:
        together.any_worker(False)  # all begin together
        rate = steps / time_call(train, steps)
        return float(together.sum_over_workers([rate])[0]) / together.topology.num_workers

    return sample


def count_steps(together: Strategy, train: Train) -> int:
    """As many steps as take about SAMPLE_SECONDS, the same for all workers."""
    steps = 1
    train(steps)
    while (seconds := float(together.from_chief([time_call(train, steps)])[0])) < SAMPLE_SECONDS / 2:
        steps *= 2
    return max(1, round(steps * SAMPLE_SECONDS / seconds))


def keep_chiefs(strategy: Strategy, figures: list[Figure]) -> list[Figure]:
    """What the first worker leaves; nobody goes before all are done."""
    strategy.any_worker(False)
    time.sleep(1.0)  # a process that ends at once takes what it still had to send with it
    return figures if strategy.topology.is_chief else []


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
