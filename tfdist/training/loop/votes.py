"""What a worker wants of the next boundary, on which all have to agree.

Invariant: a vote travels with the reduction that every call of the step function makes anyway, so agreeing costs
nothing, and every worker reads the same answer at the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf


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
Votes = Callable[[], Vote]


def no_votes() -> Vote:
    """Of a worker that continues to the end."""
    return Vote()
