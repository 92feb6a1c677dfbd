"""Which callbacks act on single batches.

Invariant: the answer follows from the classes and settings of all callbacks, those included that only the chief runs,
so every worker makes calls of the same length. Some of Keras's callbacks override a batch hook and do nothing in it
under their settings; they shorten no call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


def _saves_by_epoch(callback: Any) -> bool:
    return callback.save_freq == "epoch"


def _summarizes_by_epoch(callback: Any) -> bool:
    """Whether TensorBoard writes nothing for a batch; what it profiles it keeps under a private name."""
    return callback.update_freq == "epoch" and not callback.write_steps_per_second and not callback._should_trace


def _acts_on_divergence_only(callback: Any) -> bool:
    """TerminateOnNaN: the step itself ends a call where the loss is not finite, and the loop then calls the hooks."""
    del callback
    return True


# Only names that this release of Keras has: OrbaxCheckpoint is one of its newer ones.
_IDLE: dict[str, Callable[[Any], bool]] = {
    "ModelCheckpoint": _saves_by_epoch,
    "OrbaxCheckpoint": _saves_by_epoch,
    "TensorBoard": _summarizes_by_epoch,
    "TerminateOnNaN": _acts_on_divergence_only,
}


def overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether it has a hook of its own; LambdaCallback has them on the instance."""
    return _function(callback, hook) is not getattr(keras.callbacks.Callback, hook)


def acting(callbacks: Sequence[keras.callbacks.Callback], hooks: Sequence[str]) -> list[str]:
    """The class names of those that do something in one of `hooks`, each once."""
    names = (type(c).__name__ for c in callbacks if any(overrides(c, h) and not _is_idle(c, h) for h in hooks))
    return list(dict.fromkeys(names))


def _function(callback: keras.callbacks.Callback, hook: str) -> Any:
    method = getattr(callback, hook)
    return getattr(method, "__func__", method)


def _is_idle(callback: keras.callbacks.Callback, hook: str) -> bool:
    """Whether it is one of Keras's own hooks, of a callback whose settings leave it nothing to do there."""
    for name, is_idle in _IDLE.items():
        kind = getattr(keras.callbacks, name, None)
        if kind is not None and isinstance(callback, kind) and _function(callback, hook) is getattr(kind, hook):
            return is_idle(callback)
    return False
