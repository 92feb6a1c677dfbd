"""tfdist beside other frameworks: PyTorch, Keras on JAX, JAX, grain and orbax, which tools/peers.sh installs.

Each framework runs in processes of its own; all take samples in turn, in each round one. A figure is the median of the
rounds' ratios, tfdist ÷ peer. Where the sides' models differ in their number of weights, or their batches in types or
shapes, there is no figure. Takes some forty minutes on two cores.

    one_device    steps/s of seven models on all cores, beside Keras's fit on JAX, a hand-written loop on JAX, PyTorch
                  eager and compiled (for images with channels last too): the same layers, Adam, batch and number of
                  examples, shuffled in memory
    two_workers   steps/s of two processes with a core and a thread each, under MultiWorker and, where it is installed,
                  Horovod, beside PyTorch's DistributedDataParallel over gloo
    input         examples/s of PNG files in ArrayRecord, of a Parquet table and of arrays in memory, beside the best of
                  grain with and without threads and worker processes, which the figure names
    backup        the stall of the training's thread by a checkpoint of 202 MB, beside orbax's asynchronous save: of the
                  call, and with what the next step takes longer (JAX donates the state to it)

    python benchmarks/peers.py [--part=PART] [--rounds=N] [--json=FILE]
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from measuring import Figure, as_table, figures_of, report
from sizes import ONE_DEVICE

PARTS = ("one_device", "two_workers", "input", "backup")
LAUNCH = ("--workers=2", "--pin_cpus")


def measure(parts: Sequence[str], *, rounds: int) -> list[Figure]:
    found = []
    for part in parts:
        for figures in _figures(part, rounds):
            print(as_table(figures), flush=True)  # the whole takes long, and may be cut off
            found += figures
    return found


def _figures(part: str, rounds: int) -> Iterator[list[Figure]]:
    if part == "one_device":
        for name in ONE_DEVICE:
            yield figures_of("peers_parts", "one_device", name, rounds)
    elif part == "two_workers":
        yield figures_of("peers_parts", "two_workers", "multi_worker", rounds, launch=LAUNCH)
        if importlib.util.find_spec("horovod"):
            launch = (*LAUNCH, "--launcher=horovod")
            yield figures_of("peers_parts", "two_workers", "horovod", rounds, launch=launch)
    elif part == "input":
        for kind in ("png", "parquet", "memory"):
            yield figures_of("peers_parts", "reading", kind, rounds)
    else:
        for way in ("call", "with_step"):
            yield figures_of("peers_parts", "backup", way, rounds)


if __name__ == "__main__":
    report(__doc__, measure, parts=PARTS, numbers={"rounds": 9})
