"""What sharded state costs and saves, and what sums in one order cost.

The parts `times` and `times_horovod` divide, in the same processes and interleaved, a step with `train.sharding` by one
without, one with sharded weights by one that computes blocks again, and one with canonical replicas by one with as many
microbatches: a transformer encoder of 9.5 million weights with Adam, two workers with a core and one thread for
operations each. The part `peak` tells what a process grows by in two steps of an encoder of 59 million weights (0.94 GB
of weights, gradients and slots), with 2 and 4 workers, in processes of their own. The part `checkpoint` stores one of
113 MB from 4 workers into a store that takes 20 MB/s a stream.

    python benchmarks/sharding.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from emulator import BUCKET, emulator
from measuring import Figure, choose_size, make_ratio, measure_part, measure_peak, report, take_samples
from scaling import LAUNCH
from step import build_sample
from trainings import build_training
from workloads import NUM_CLASSES, Workload

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.data.sources.arrays import ArraySource
from tfdist.experiment import train
from tfdist.models.transformer import TransformerBlock
from tfdist.storage import files
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.console.console import Console
from tfdist.telemetry.json_text import from_json
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import TrainSettings

PARTS = ("times", "times_horovod", "peak", "checkpoint")
PEAK_ROUNDS, CHECKPOINT_ROUNDS = 1, choose_size(3, 1)
WIDTH, LARGE_WIDTH = choose_size((256, 640), (8, 16))  # 9.5 and 59 million weights
MOST_WORKERS = choose_size(4, 2)
STREAM_BYTES_PER_SECOND = 20e6
LAYERS, LENGTH, BATCH = choose_size((12, 32, 16), (1, 8, 8))
MOST_FILE_BYTES = 8 * 2**20  # a fourteenth of the checkpoint, as 256 MiB, the default, are of 3.5 GiB
TIMES_ROUNDS, STEPS = 9, 3
CANONICAL_REPLICAS = 4
BLOCKS = ["block_*"]


def measure(parts: Sequence[str]) -> Iterator[list[Figure]]:
    for part, strategy in (("times", "multi_worker"), ("times_horovod", "horovod")):
        if part in parts:
            yield measure_part("sharding", "step_times", strategy, launch=LAUNCH[strategy])
    if "peak" in parts:
        yield peaks()
    if "checkpoint" in parts:
        yield checkpoints()


def peaks() -> list[Figure]:
    figures = []
    ways = choose_size(("none", "optimizer", "weights"), ("none", "weights"))
    for workers in sorted({2, MOST_WORKERS}):
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(PEAK_ROUNDS):
            for sharding, grown in found.items():
                launch = (f"--workers={workers}",)
                (figure,) = measure_part("sharding", "peak_with", sharding, LARGE_WIDTH, launch=launch)
                grown.append(figure.ours)
        for sharding in ways[1:]:
            name = f"{workers} workers, {sharding}: peak memory ÷ without"
            goal = 1 / workers + 0.05 if sharding == "weights" else None
            figures.append(make_ratio(name, found[sharding], found["none"], goal, unit="MB", at_most=True))
    return figures


def checkpoints() -> list[Figure]:
    slow = {"kind": "slow_upload", "path": "upload", "count": None, "bytes_per_second": STREAM_BYTES_PER_SECOND}
    seconds: dict[str, list[float]] = {"all": [], "chief": []}
    for _ in range(CHECKPOINT_ROUNDS):
        for writers, found in seconds.items():
            with emulator(slow):
                (figure,) = measure_part("sharding", "checkpoint", writers, launch=(f"--workers={MOST_WORKERS}",))
            found.append(figure.ours)
    name = f"checkpoint by all of {MOST_WORKERS} workers ÷ by the chief"
    return [make_ratio(name, seconds["all"], seconds["chief"], 0.4, unit="s", at_most=True)]


def encoder(width: int = WIDTH) -> Workload:
    def build() -> keras.Model:
        inputs = x = keras.Input((LENGTH, width))
        for index in range(LAYERS):
            x = TransformerBlock(4, causal=False, name=f"block_{index}")(x)
        return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(keras.layers.GlobalAveragePooling1D()(x)))

    return Workload("encoder", build, (LENGTH, width), BATCH, 8 * BATCH)


def connect(name: str) -> Strategy:
    strategy = {"multi_worker": MultiWorker, "horovod": Horovod}[name]()
    strategy.connect()
    return strategy


def step_times(name: str) -> list[Figure]:
    strategy = connect(name)
    own = CANONICAL_REPLICAS // strategy.topology.num_replicas
    ways: dict[str, dict[str, Any]] = {
        "without": {},
        "optimizer": {"sharding": "optimizer"},
        "recomputed": {"recompute": BLOCKS},
        "weights": {"sharding": "weights"},
        "microbatches": {"num_microbatches": own},
        "canonical": {"num_parts": CANONICAL_REPLICAS},
    }
    pairs: list[tuple[str, str, float]] = [
        ("optimizer", "without", 1.05),
        ("canonical", "microbatches", 1.1),
        *choose_size([("weights", "recomputed", 1.1)], []),
    ]
    ways = {way: each for way, each in ways.items() if any(way in pair for pair in pairs)}
    made = {way: build_training(strategy, encoder(), **each) for way, each in ways.items()}
    contenders = [build_sample(train, STEPS) for _, train in made.values()]
    for sample in contenders:  # canonical sums change an option of TensorFlow's, after which all is optimized anew
        sample()
    rates = dict(zip(made, take_samples(contenders, TIMES_ROUNDS), strict=True))
    seconds = {way: [1e3 / rate for rate in found] for way, found in rates.items()}
    figures = [
        make_ratio(f"{name}, {way}: step time ÷ {peer}", seconds[way], seconds[peer], goal, unit="ms", at_most=True)
        for way, peer, goal in pairs
    ]
    if not strategy.topology.is_chief:
        return []
    held = {way: sum(4 * int(np.prod(v.shape)) for v in made[way][0].optimizer.variables) / 2**20 for way in ways}
    slots = f"{name}, optimizer: slots of worker 0 ÷ without"
    return [*figures, make_ratio(slots, [held["optimizer"]], [held["without"]], 0.55, unit="MB", at_most=True)]


def peak_with(sharding: str, width: str) -> list[Figure]:
    """What the peak of this process grows by in two steps, in MB."""
    strategy = connect("multi_worker")
    settings = {} if sharding == "none" else {"sharding": sharding}
    workload = encoder(int(width))
    return measure_peak(sharding, lambda: build_training(strategy, workload, **settings)[1](2))


def checkpoint(writers: str) -> list[Figure]:
    """The seconds until a checkpoint is stored that these workers write into a store whose streams are slow."""
    strategy = connect("multi_worker")
    directory = f"gs://{BUCKET}/{writers}"
    # The one at the end alone.
    policy = CheckpointPolicy(every_epochs=10**6, writers=writers, max_file_bytes=MOST_FILE_BYTES)
    workload = encoder()
    settings = TrainSettings(
        model=workload.build_model,
        train_data=lambda: ArraySource(workload.arrays()),
        optimizer=keras.optimizers.Adam,
        task=Supervised(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        strategy=strategy,
        global_batch_size=BATCH,
        steps=1,
        checkpoint=policy,
    )
    train(settings, Request(run_dir=directory, console=lambda is_chief: Console()))
    if not strategy.topology.is_chief:
        return []
    events = [from_json(line) for line in files.read(RunDirectory(directory).events).splitlines()]
    (seconds,) = [each["details"]["write_seconds"] for each in events if each["event"] == "checkpoint_saved"]
    return [Figure(writers, seconds, None, (seconds, seconds), seconds, seconds, "s")]


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
