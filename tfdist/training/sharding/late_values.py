"""A model whose variables have shapes and no values yet, so that one that does not fit is never whole in one place.

Keras puts values off within a scope; which are given then, and where, is decided when all owners are known. Invariant:
a variable gets the value that it would have had at once, as an initializer's seed is drawn when it is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist.errors import UserError

_PENDING = "uninitialized_variables"


class LateValues:
    """A context: the Keras variables that are made within it get their values by `give`."""

    def __init__(self) -> None:
        self._scope = keras.StatelessScope(initialize_variables=False)
        self._made: list[keras.Variable] = []

    def __enter__(self) -> LateValues:
        self._scope.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._scope.__exit__(kind, error, trace)
        self._made = global_state.get_global_attribute(_PENDING) or []
        global_state.set_global_attribute(_PENDING, [])
        if isinstance(error, ValueError) and "in a stateless scope" in str(error):
            raise UserError(
                "train.sharding = 'weights' or by layers, and stages, make the model's variables before their values, "
                "and the model's builder makes one of an array. Use layer.add_weight(shape=..., initializer=...), or "
                "leave these out."
            ) from error

    def give(
        self,
        *,
        but: Callable[[keras.Variable], bool] = lambda variable: False,
        device: Callable[[keras.Variable], str | None] = lambda variable: None,
    ) -> None:
        """Gives variables their values, within the strategy's scope.

        Args:
          but: for which it does not, unless they were assigned to.
          device: where each is to lie; None leaves that to TensorFlow.
        """
        for variable in self._made:
            assigned = self._scope.get_current_value(variable)
            if assigned is None and but(variable):
                continue
            with contextlib.nullcontext() if (where := device(variable)) is None else tf.device(where):
                variable._deferred_initialize()
            if assigned is not None:
                variable.assign(assigned)
