"""What a loss or gradients that are not finite mean for a run."""

from __future__ import annotations

import keras

from tfdist.errors import DivergedError
from tfdist.telemetry.reporter import Reporter
from tfdist.training.step.precision import LossScale


def judge(
    *, step: int, steps: int, overflowed: int, loss_scale: LossScale | None, reporter: Reporter
) -> DivergedError | None:
    """The error that a call of `steps`, of which `overflowed` were not finite, ends the run with; None if it continues.

    With a loss scale such steps were skipped, which is told, and the scale is lower now.
    """
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
