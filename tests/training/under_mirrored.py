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
from equivalence.cases import OVERFLOW, dense_model, digits, one_hot_digits, overflowing_digits
from training.trainings import Trained, run, softmax_model

from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.strategy import Strategy
from tfdist.tasks.supervised import Supervised
from tfdist.training.step.normalization import global_moments

MANY_METRICS: dict[str, Any] = {
    "model": softmax_model,
    "train_data": one_hot_digits,
    "eval_data": one_hot_digits,
    "epochs": 1,
    "eval_batch_size": 149,  # leaves one example to two replicas
    "task": lambda: Supervised(
        loss=keras.losses.CategoricalCrossentropy(),
        metrics=[
            lambda: keras.metrics.AUC(name="auc"),
            lambda: keras.metrics.AUC(multi_label=True, name="multi_label_auc"),
            lambda: keras.metrics.Precision(thresholds=0.15, name="precision"),
            lambda: keras.metrics.PrecisionAtRecall(0.5, name="at_recall"),
            lambda: keras.metrics.OneHotMeanIoU(10, name="iou"),
            lambda: keras.metrics.F1Score(name="f1"),  # one number a class
            lambda: keras.metrics.R2Score(name="r2"),  # counts in integers
            lambda: keras.metrics.CosineSimilarity(name="cosine"),
            lambda: keras.metrics.TopKCategoricalAccuracy(3, name="top"),
        ],
    ),
}

Check = Callable[[Strategy, pathlib.Path], Any]


def copies(trained: Trained) -> list[str]:
    """The bits of every replica's copy of every variable."""
    values = [value for v in trained.model.variables for value in v.value.values]
    return [np.asarray(value).tobytes().hex() for value in values]


def moments_data(offset: float, *, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [7, 3, 5] around `offset`, and a mask of their first two axes; some that is left out is not finite."""
    random = np.random.default_rng(5)
    inputs = (random.normal(size=(7, 3, 5)) + offset).astype(np.float32)
    mask = random.uniform(size=(7, 3)) < 0.6
    if masked:
        inputs[~mask] = 1e6
    return inputs, mask


def moments(strategy: Strategy, offset: float, masked: bool) -> dict[str, Any]:
    """Mean, variance and the gradient of the sum of their squares over two replicas with 3 and 4 examples."""

    def on_replica(x: tf.Tensor, mask: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, variance, _ = global_moments(x, mask if masked else None, [0, 1])
            loss = tf.reduce_sum(mean**2 + variance**2)
        return mean, variance, tape.gradient(loss, x)

    mean, variance, gradient = _on_two(strategy, on_replica, offset, masked)
    return {"mean": mean, "variance": variance, "gradient": [row for part in gradient for row in part]}


def _on_two(strategy: Strategy, on_replica: Any, offset: float, masked: bool) -> list[list[Any]]:
    """What `on_replica` gives for the parts of `moments_data`: [result][replica]."""
    parts = [(part[:3], part[3:]) for part in moments_data(offset, masked=masked)]
    given = [
        strategy.distribution.experimental_distribute_values_from_function(
            lambda context, part=part: tf.constant(part[context.replica_id_in_sync_group])
        )
        for part in parts
    ]
    results = tf.function(lambda *a: strategy.run(on_replica, args=a), autograph=False)(*given)
    return [[v.numpy().tolist() for v in strategy.distribution.experimental_local_results(r)] for r in results]


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


def xla_batch_norm(strategy: Strategy, directory: pathlib.Path) -> str:
    changes = {"epochs": 1, "xla": "pass", "model": lambda: dense_model(batch_norm=True)}
    return str(run(directory, strategy=strategy, may_fail=True, **changes).error)


CHECKS: dict[str, Check] = {
    "overflow": overflow,
    "metrics": metrics,
    **{
        f"moments_{offset:g}_{masked}": lambda strategy, _, offset=offset, masked=masked: moments(
            strategy, offset, masked
        )
        for offset in (0.0, 100.0, 1000.0)
        for masked in (False, True)
    },
    "xla_batch_norm": xla_batch_norm,
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
