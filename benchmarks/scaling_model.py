"""A model of a step's time for N workers, fitted to N = 1, 2, 4 … processes of this machine; scaling.md says why.

It trains one workload with a fixed global batch under MultiWorkerMirroredStrategy, one thread a worker, and prints the
model's steps/s (`ours`) beside those measured (`peer`), once fitted to all numbers of workers and once to all others.
With C processors and fewer than N of them a step takes

    examples / min(N, C) + own · max(1, N / C) + message · 2 (N − 1) · max(1, N / C)

where `examples` is the work that the workers share, `own` what each does in full (the update, the host) and `message`
a message of the ring.

    python benchmarks/scaling_model.py [--json=FILE] [--rounds=2] [--most_workers=8]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
from measuring import Figure, choose_size, figures_of, interleaved, ratio, report

TERMS = ("examples", "own", "message")


def measure(*, rounds: int, most_workers: int) -> list[Figure]:
    counts = [2**i for i in range(most_workers.bit_length()) if 2**i <= most_workers]
    samples = dict(zip(counts, interleaved([trained_by(count) for count in counts], rounds), strict=True))
    seconds = {count: 1 / float(np.median(rates)) for count, rates in samples.items()}
    fitted = parameters(seconds)
    print("; ".join(f"{name} {value * 1e3:.3f} ms" for name, value in zip(TERMS, fitted, strict=True)))
    figures = []
    for count, rates in samples.items():
        others = {other: value for other, value in seconds.items() if other != count}
        for name, known in (("fitted to all", seconds), ("fitted to the others", others)):
            if len(known) >= len(TERMS):
                predicted = [1 / float(terms(count) @ parameters(known))] * len(rates)
                figures.append(ratio(f"{count} workers, {name}: model ÷ measured", predicted, rates, None))
    return figures or [ratio(f"{count} workers, measured", r, r, None) for count, r in samples.items()]


def trained_by(count: int) -> Callable[[], float]:
    """Steps/s of so many processes, started anew for each sample."""
    return lambda: figures_of("scaling", "rate", launch=(f"--workers={count}",))[0].value


def terms(count: int) -> np.ndarray:
    """What each parameter is multiplied by."""
    processors = len(os.sched_getaffinity(0))
    crowd = max(1.0, count / processors)
    return np.array([1 / min(count, processors), crowd, 2 * (count - 1) * crowd])


def parameters(seconds: Mapping[int, float]) -> np.ndarray:
    """In seconds, of TERMS; least squares of what the model is off by in relation to what was measured."""
    rows = [terms(count) / value for count, value in seconds.items()]
    return np.linalg.lstsq(np.stack(rows), np.ones(len(rows)), rcond=None)[0]


if __name__ == "__main__":
    report(__doc__, measure, numbers={"rounds": 2, "most_workers": choose_size(8, 2)})
