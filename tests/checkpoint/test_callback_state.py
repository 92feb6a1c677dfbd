"""What a checkpoint may set in a callback: state, and nothing that its class defines."""

from __future__ import annotations

import keras
import pytest

from tfdist.checkpoint.callback_state import Baseline
from tfdist.checkpoint.format.manifest import DamagedCheckpoint

pytestmark = pytest.mark.slow


def test_state_comes_back_and_a_method_cannot_be_replaced() -> None:
    callback = keras.callbacks.EarlyStopping()
    callback.on_train_begin()
    baseline = Baseline([callback])
    baseline.restore({"EarlyStopping.0": {"wait": 3, "best": 0.5}}, {})
    assert (callback.wait, callback.best) == (3, 0.5)
    for attribute in ("on_epoch_end", "__class__", "_model", "a b"):
        with pytest.raises(DamagedCheckpoint, match="which is no state of it"):
            baseline.restore({"EarlyStopping.0": {attribute: 1}}, {})
