"""What tests ask of MirroredStrategy with two replicas, all in one process: `python -m training.under_mirrored DIR`.

Writes DIR/results.json: what each function of CHECKS returned, or the traceback of its error.
"""

from __future__ import annotations

import json
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from equivalence.cases import OVERFLOW, dense_model, digits, overflowing_digits
from training.checks import MANY_METRICS, moments
from training.trainings import Trained, run

from tfdist.keras_patches.patches import Patches
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.strategy import Strategy
from tfdist.training.step.optimizer import disable_reduction

Check = Callable[[Strategy, pathlib.Path], Any]


def copies(trained: Trained) -> list[str]:
    """The bits of every replica's copy of every variable."""
    values = [value for v in trained.model.variables for value in v.value.values]
    return [np.asarray(value).tobytes().hex() for value in values]


def summed_gradients(strategy: Strategy, directory: pathlib.Path) -> dict[str, float]:
    """What one plain SGD step of a gradient of 1 on each replica takes off a weight, with and without the guard."""
    moved = {}
    for name in ("with", "without"):
        with strategy.scope():
            weight = keras.Variable(0.0, name="weight")
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([weight])
        if name == "with":
            disable_reduction(optimizer, Patches())

        def apply(weight: Any = weight, optimizer: Any = optimizer) -> None:
            optimizer.apply([tf.constant(1.0)], [weight])

        tf.function(lambda apply=apply: strategy.run(apply))()
        moved[name] = -float(weight.numpy())
    return moved


def overflow(strategy: Strategy, directory: pathlib.Path) -> dict[str, Any]:
    """The second of three batches overflows in the last replica's part; and a training without that batch."""
    settings = OVERFLOW | {"strategy": strategy, "model": lambda: dense_model(batch_norm=True)}
    settings |= {"log_every_steps": 1, "steps_per_call": 1}
    trained = run(directory / "with", **settings, train_data=overflowing_digits)
    other = run(directory / "left_out", **settings, train_data=lambda: digits(128))
    return {
        "copies": copies(trained),
        "left_out": copies(other),
        "skipped": [{"step": e["step"], **e["details"]} for e in trained.events("gradient_overflow")],
        "metrics": trained.result.train_metrics,
        "metrics_left_out": other.result.train_metrics,
    }


def metrics(strategy: Strategy, directory: pathlib.Path) -> dict[str, Any]:
    result = run(directory, strategy=strategy, **MANY_METRICS).result
    return {"train": result.train_metrics, "eval": result.eval_metrics}


def weights(**changes: Any) -> Check:
    def check(strategy: Strategy, directory: pathlib.Path) -> list[Any]:
        return [w.tolist() for w in run(directory, strategy=strategy, **changes).weights()]

    return check


CHECKS: dict[str, Check] = {
    "summed_gradients": summed_gradients,
    "overflow": overflow,
    "metrics": metrics,
    **{
        f"moments_{offset:g}_{masked}": lambda strategy, _, offset=offset, masked=masked: moments(
            strategy, offset, masked
        )
        for offset in (0.0, 100.0, 1000.0)
        for masked in (False, True)
    },
    "xla_off": weights(epochs=1),
    "xla_on": weights(epochs=1, xla="on"),
    "xla_on_microbatches": weights(epochs=1, xla="on", num_microbatches=3, train_data=lambda: digits(301)),
    "xla_off_microbatches": weights(epochs=1, num_microbatches=3, train_data=lambda: digits(301)),
}


def main(directory: pathlib.Path) -> None:
    strategy = Mirrored(num_cpu_devices=2)
    strategy.connect()
    results: dict[str, Any] = {}
    for name, check in CHECKS.items():
        try:
            results[name] = {"value": check(strategy, directory / name)}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
