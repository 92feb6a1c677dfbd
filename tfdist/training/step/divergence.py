"""What a loss or gradients that are not finite, or a loss far above the others, mean for a run."""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf

from tfdist.errors import DivergedError
from tfdist.telemetry.reporter import Reporter
from tfdist.training.step.precision import LossScale

MAD_TO_DEVIATION = 1.4826  # of a normal distribution's median absolute deviation


@dataclasses.dataclass(frozen=True)
class Spike:
    """When a loss is a spike: its robust z-score among the last ones is above a limit.

    Attributes:
      z_score: (loss - median) ÷ (1.4826 · median absolute deviation); only losses above the median count.
      window: of how many steps.
    """

    z_score: float
    window: int

    def is_one(self, loss: tf.Tensor, recent: tf.Tensor) -> tf.Tensor:
        """bool scalar; never before the window, float64 [window], is full of numbers."""
        loss = tf.cast(loss, recent.dtype)
        middle = _median(recent)
        deviation = MAD_TO_DEVIATION * _median(tf.abs(recent - middle))
        return tf.reduce_all(tf.math.is_finite(recent)) & (loss - middle > self.z_score * deviation)


def judge(
    *, step: int, steps: int, overflowed: int, spiked: bool, loss_scale: LossScale | None, reporter: Reporter
) -> DivergedError | None:
    """The error that a call of `steps`, of which `overflowed` were not finite, ends the run with; None if it continues.

    With a loss scale such steps were skipped, which is told, and the scale is lower now.
    """
    if spiked:
        return DivergedError(
            f"The loss of step {step} is far above those before it, by more than train.on_divergence takes."
        )
    if not overflowed:
        return None
    if loss_scale is None:
        return DivergedError(
            f"Training diverged at step {step}: the loss or a gradient is not finite. Try a lower "
            "learning rate, clipping (global_clipnorm = 1.0) or train.precision = 'float32', and look for examples "
            "that are not finite."
        )
    scale = float(keras.ops.convert_to_numpy(loss_scale.scale))
    if overflowed == steps and scale <= 1.0:
        return DivergedError(
            f"Training diverged at step {step}: gradients overflow float16 even at loss scale 1. Try "
            "train.precision = 'bfloat16' or 'float32', or a lower learning rate."
        )
    reporter.skipped(step=step, steps=overflowed, scale=scale)
    return None


def _median(values: tf.Tensor) -> tf.Tensor:
    in_order = tf.sort(values)
    size = values.shape[0]
    return (in_order[(size - 1) // 2] + in_order[size // 2]) / 2
