"""Why a training came to its end, in a word for programs and in a sentence for people.

Invariant: a callback that stopped the run is named, with what it had seen; where several could have, all of them are.
`course.tell_ending` says it, and result.json keeps it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras

COMPLETED = "completed"
EARLY_STOPPING = "early_stopping"
# Of Keras's own callbacks, those that may set `stop_training`.
STOPPING = (keras.callbacks.EarlyStopping, keras.callbacks.TerminateOnNaN)


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a training ended.

    Attributes:
      reason: COMPLETED, or EARLY_STOPPING where a callback ended it.
      stopped_by: the class of that callback; None where all was trained, or it cannot be told.
      message: a sentence about an early end; empty otherwise.
    """

    reason: str = COMPLETED
    stopped_by: str | None = None
    message: str = ""


def ending_of(
    callbacks: Sequence[keras.callbacks.Callback], *, stopped: bool, step: int, epoch: int, total_steps: int
) -> Ending:
    """How a training ended at `step`, in `epoch` counted from 1; `stopped`: by a callback."""
    if not stopped:
        return Ending()
    patient = next((c for c in callbacks if getattr(c, "stopped_epoch", 0)), None)
    suspects = [patient] if patient is not None else [c for c in callbacks if _may_stop(c)]
    names = " or ".join(dict.fromkeys(type(c).__name__ for c in suspects)) or "A callback"
    where = f"at step {step:,} of {total_steps:,}, the end of epoch {epoch}"
    seen = "" if patient is None else _seen(patient)
    return Ending(EARLY_STOPPING, names if len(suspects) == 1 else None, f"{names} stopped the training {where}{seen}.")


def _may_stop(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, STOPPING) or not type(callback).__module__.startswith("keras.")


def _seen(callback: keras.callbacks.Callback) -> str:
    """What an EarlyStopping, or a callback like it, waited for."""
    monitor, best = getattr(callback, "monitor", None), getattr(callback, "best", None)
    if monitor is None or best is None:
        return ""
    epoch = getattr(callback, "best_epoch", None)
    when = f" of epoch {epoch + 1}" if isinstance(epoch, int) else ""
    put_back = getattr(callback, "restore_best_weights", False) and getattr(callback, "best_weights", None) is not None
    then = "; the weights of that epoch are put back" if put_back else ""
    return f": {monitor} has not come below or above its best, {float(best):.4g}{when}{then}"
