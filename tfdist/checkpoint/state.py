"""The state that a checkpoint holds, and where checkpoints tell what happens to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from tfdist.checkpoint.format.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class State:
    """A run between two steps.

    Attributes:
      step: optimizer updates that were done.
      tensors: by name. To save: a `tf.Variable` (also a distributed one), a Keras variable, a `tf.Tensor` or an
        array; restored: NumPy arrays that must not be written to (they may stand on a mapped file).
      values: what JSON can hold: position, sums of the epoch, the state of callbacks.
      manifest: of the checkpoint that it was read from: identity, metrics, created; None on a state to be saved.
      path: of that checkpoint.
    """

    step: int
    tensors: Mapping[str, Any]
    values: Mapping[str, Any]
    manifest: Manifest | None = None
    path: str | None = None


class EventSink(Protocol):
    """What of `EventLog` the checkpoints use."""

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None: ...

    def warning(
        self, event: str, *, step: int | None = None, message: str | None = None, **details: object
    ) -> None: ...
