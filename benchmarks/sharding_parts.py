"""The measurements of sharding.py, each run by two workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from emulator import BUCKET
from measuring import Figure, choose_size, interleaved, peak_growth, ratio
from peer import PYTHON, Peer
from sharding import WIDTH
from step_parts import sampled
from trainings import tfdist_learner_and_training
from workloads import NUM_CLASSES, Workload

from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.data.sources.arrays import ArraySource
from tfdist.experiment import train
from tfdist.models.transformer import TransformerBlock
from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.multi_worker import MultiWorker
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.console.console import NullConsole
from tfdist.telemetry.json_text import from_json
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.run import Request
from tfdist.training.run.settings import TrainSettings

LAYERS, LENGTH, BATCH = choose_size((12, 32, 16), (1, 8, 8))
MOST_FILE_BYTES = 8 * 2**20  # a fourteenth of the checkpoint, as 256 MiB, the default, are of 3.5 GiB
ROUNDS, STEPS = 9, 3
FSDP2 = "fsdp2_recomputed"
PARTS = 4
BLOCKS = ["block_*"]


def fsdp2_peer(way: str) -> Peer:
    """PyTorch's sharding of the same encoder; it tells by how many MB its peak memory had grown after two steps."""
    return Peer("sharding_peer.py", way, LAYERS, LENGTH, WIDTH, BATCH, workers=2)


def encoder(width: int = WIDTH) -> Workload:
    def build() -> keras.Model:
        inputs = x = keras.Input((LENGTH, width))
        for index in range(LAYERS):
            x = TransformerBlock(4, causal=False, name=f"block_{index}")(x)
        return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(keras.layers.GlobalAveragePooling1D()(x)))

    return Workload("encoder", build, (LENGTH, width), BATCH, 8 * BATCH)


def connected(name: str) -> Strategy:
    strategy = {"multi_worker": MultiWorker, "horovod": Horovod}[name]()
    strategy.connect()
    return strategy


def times(name: str) -> list[Figure]:
    strategy = connected(name)
    own = PARTS // strategy.topology.num_replicas
    ways: dict[str, dict[str, Any]] = {
        "without": {},
        "optimizer": {"sharding": "optimizer"},
        "recomputed": {"recompute": BLOCKS},
        "weights": {"sharding": "weights"},
        "microbatches": {"num_microbatches": own},
        "canonical": {"num_microbatches": own, "in_order": True},
    }
    fsdp2 = {FSDP2: fsdp2_peer(FSDP2)} if strategy.topology.is_chief and PYTHON.exists() else {}
    pairs: list[tuple[str, str, float]] = [
        ("optimizer", "without", 1.05),
        ("canonical", "microbatches", 1.1),
        *choose_size([("weights", "recomputed", 1.1)], []),
    ]
    ways = {way: each for way, each in ways.items() if any(way in pair for pair in pairs)}
    made = {way: tfdist_learner_and_training(strategy, encoder(), **each) for way, each in ways.items()}
    contenders = [sampled(train, STEPS) for _, train in made.values()]
    for sample in contenders:  # canonical sums change an option of TensorFlow's, after which all is optimized anew
        sample()
    with_peers = strategy.any_worker(bool(fsdp2))

    def peer(way: str) -> Callable[[int], None]:
        def train(steps: int) -> None:
            if way in fsdp2:
                fsdp2[way](steps)
            strategy.any_worker(False)  # the other worker waits

        return train

    peers = (FSDP2,) if with_peers else ()
    contenders += [sampled(peer(way), STEPS) for way in peers]
    rates = dict(zip([*made, *peers], interleaved(contenders, ROUNDS), strict=True))
    for each in fsdp2.values():
        each.close()
    seconds = {way: [1e3 / rate for rate in found] for way, found in rates.items()}
    pairs += [("weights", FSDP2, 1.0)]
    figures = [
        ratio(f"{name}, {way}: step time ÷ {peer}", seconds[way], seconds[peer], goal, unit="ms", at_most=True)
        for way, peer, goal in pairs
        if {way, peer} <= {*seconds}
    ]
    if not strategy.topology.is_chief:
        return []
    held = {way: sum(4 * int(np.prod(v.shape)) for v in made[way][0].optimizer.variables) / 2**20 for way in ways}
    slots = f"{name}, optimizer: slots of worker 0 ÷ without"
    return [*figures, ratio(slots, [held["optimizer"]], [held["without"]], 0.55, unit="MB", at_most=True)]


def peak(sharding: str, width: str) -> list[Figure]:
    """What the peak of this process grows by in two steps, in MB."""
    strategy = connected("multi_worker")
    settings = {} if sharding == "none" else {"sharding": sharding}
    workload = encoder(int(width))
    return peak_growth(sharding, lambda: tfdist_learner_and_training(strategy, workload, **settings)[1](2))


def checkpoint(writers: str) -> list[Figure]:
    """The seconds until a checkpoint is stored that these workers write into a store whose streams are slow."""
    strategy = connected("multi_worker")
    directory = f"gs://{BUCKET}/{writers}"
    policy = CheckpointPolicy(
        every_epochs=10**6, writers=writers, max_file_bytes=MOST_FILE_BYTES
    )  # the one at the end alone
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
    train(settings, Request(run_dir=directory, console=lambda is_chief: NullConsole()))
    if not strategy.topology.is_chief:
        return []
    events = [from_json(line) for line in files.read(RunDirectory(directory).events).splitlines()]
    (seconds,) = [each["details"]["write_seconds"] for each in events if each["event"] == "checkpoint_saved"]
    return [Figure(writers, seconds, None, (seconds, seconds), seconds, seconds, "s")]


def peak_of_fsdp2() -> list[Figure]:
    """The same of PyTorch's first process."""
    peer = fsdp2_peer(FSDP2)
    peer.close()
    grown = float(peer.told)
    return [Figure("fsdp2", grown, None, (grown, grown), grown, grown, "MB")]
