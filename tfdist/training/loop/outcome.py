"""How far a loop has come, why it ends, and what each worker wants of the next boundary.

Invariant: made of numbers, strings and dicts of them, as a checkpoint keeps both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


@dataclasses.dataclass
class Outcome:
    """Where a loop ended; `best` as `best.Watched.newest` gives it; `weightless` steps of the whole run."""

    step: int = 0
    stopped_early: bool = False
    train_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluated_at: int = -1
    paused: bool = False
    best: dict[str, Any] | None = None
    weightless: int = 0


def mean_losses(sums: Sequence[float], term_names: Sequence[str]) -> dict[str, float]:
    """The losses to report, of what `Totals.sums` holds; none where nothing has weighed anything."""
    loss_sum, weight, weightless, *term_sums = sums
    if weightless and not weight:
        return {}
    weight = weight or float("nan")
    terms = zip(term_names, term_sums, strict=True)
    return {"loss": loss_sum / weight} | {f"{name}_loss": value / weight for name, value in terms}


# Of Keras's own callbacks, those that may set `stop_training`.
STOPPING = (keras.callbacks.EarlyStopping, keras.callbacks.TerminateOnNaN)


def suspects_of_stop(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """The classes of the callbacks that may have ended a training early: one, where one says that it has."""
    patient = [c for c in callbacks if getattr(c, "stopped_epoch", 0)][:1]
    others = [c for c in callbacks if isinstance(c, STOPPING) or not type(c).__module__.startswith("keras.")]
    return list(dict.fromkeys(type(c).__name__ for c in patient or others))


@dataclasses.dataclass(frozen=True)
class Vote:
    """What one worker wants, or what any of them does.

    Attributes:
      leave: to save and end, because the process will be taken away.
      save: a checkpoint.
      stop: to end the training here, as a callback asked for.
    """

    leave: bool = False
    save: bool = False
    stop: bool = False

    def tensor(self, news: Sequence[float] = ()) -> tf.Tensor:
        """Float32 [3 + len(news)], to be summed over the replicas: the votes, then what else the workers tell."""
        return tf.constant([float(self.leave), float(self.save), float(self.stop), *news])

    @classmethod
    def of(cls, sums: Sequence[float]) -> Vote:
        """What somebody wants, out of the sums."""
        return cls(*(bool(number > 0) for number in sums[:NUM_VOTES]))


NUM_VOTES = len(dataclasses.fields(Vote))
Votes = Callable[[], Vote]  # `Vote` itself continues to the end
