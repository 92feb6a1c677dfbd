"""The callbacks that `fit` was given, in whatever form, as a plain list.

Invariant: their order is kept, and the one History that the call answers with is found among them or made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.errors import UserError


def flat_callbacks(callbacks: Any) -> tuple[list[keras.callbacks.Callback], bool]:
    """The callbacks of one, a nest of several, or a CallbackList; and whether the run should show itself.

    A CallbackList says itself what is shown: by the ProgbarLogger that is in it, or not.

    Raises:
      UserError: one of them is no callback, or cannot work here.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        given, shows = list(callbacks.callbacks), False
    else:
        given, shows = [each for each in keras.tree.flatten(callbacks) if each is not None], True
    for callback in given:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UserError(f"callbacks holds {callback!r}, which is no keras.callbacks.Callback.")
    return given, shows


def history_among(callbacks: Sequence[keras.callbacks.Callback]) -> keras.callbacks.History:
    """The first History among them, or a new one."""
    given = next((each for each in callbacks if isinstance(each, keras.callbacks.History)), None)
    return given or keras.callbacks.History()
