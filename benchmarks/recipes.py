"""What recipes cost: gradient checkpointing, a norm that is logged.

Each is divided by the same step without it. Memory is what a process's peak grows by in its first steps, in processes
of their own, in turn. Takes about three minutes.

    python benchmarks/recipes.py [--part=PART] [--json=FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
from measuring import Figure, choose_size, figures_of, interleaved, peak_growth, ratio, report
from step import sampled
from trainings import tfdist_training
from workloads import NUM_CLASSES, Workload, mlp

from tfdist.models.transformer import TransformerBlock
from tfdist.strategies.one_device import OneDevice

PARTS = ("peak", "times")
PEAK_ROUNDS = choose_size(3, 1)
BLOCKS = ["block_*"]
LAYERS, LENGTH, WIDTH, BATCH = choose_size((24, 128, 128, 64), (1, 8, 8, 8))
ROUNDS = 7


def measure(parts: Sequence[str]) -> list[Figure]:
    return [figure for part in parts for figure in {"peak": peak, "times": times}[part]()]


def peak() -> list[Figure]:
    peaks = [[figures_of("recipes", "peak_of", how)[0].ours for how in ("again", "kept")] for _ in range(PEAK_ROUNDS)]
    again, kept = zip(*peaks, strict=True)
    return [ratio("recompute: peak memory", again, kept, 0.35, unit="MB", at_most=True)]


def times() -> list[Figure]:
    return figures_of("recipes", "step_times")


def transformer(layers: int = LAYERS) -> Workload:
    def build() -> keras.Model:
        inputs = x = keras.Input((LENGTH, WIDTH))
        for index in range(layers):
            x = TransformerBlock(4, causal=True, dropout=0.1, name=f"block_{index}")(x)
        x = keras.layers.GlobalAveragePooling1D()(x)
        return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(x))

    return Workload("transformer", build, (LENGTH, WIDTH), BATCH, 8 * BATCH)


def peak_of(how: str) -> list[Figure]:
    """What the peak of this process grows by in two steps, in MB."""
    strategy = OneDevice()
    strategy.connect()
    train = tfdist_training(strategy, transformer(), recompute=BLOCKS if how == "again" else None)
    return peak_growth(how, lambda: train(2))


def step_times() -> list[Figure]:
    strategy = OneDevice()
    strategy.connect()
    blocks, wide = transformer(choose_size(4, 1)), mlp("10 ms", 512, (512, 512), batch=1024, num_examples=1024 * 8)
    pairs: list[tuple[str, Callable[..., object], Workload, dict[str, object], int, float]] = [
        ("recompute: step time", tfdist_training, blocks, {"recompute": BLOCKS}, 3, 1.35),
        ("gradient_norm: step time", tfdist_training, wide, {"log_gradient_norm": True}, 20, 1.03),
    ]
    figures = []
    for name, make, workload, settings, steps, goal in pairs:
        contenders = [sampled(make(strategy, workload, **each), steps) for each in (settings, {})]
        ours, plain = (
            [1e3 / rate for rate in rates] for rates in interleaved(contenders, ROUNDS * (3 if goal < 1.1 else 1))
        )
        figures.append(ratio(name, ours, plain, goal, unit="ms", at_most=True))
    return figures


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS)
