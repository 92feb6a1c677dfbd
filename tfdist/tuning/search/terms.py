"""What every oracle is made from; `search.py` passes it to the oracle that it names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tfdist.tuning.search.objective import Objective

if TYPE_CHECKING:
    import keras_tuner


@dataclasses.dataclass(frozen=True)
class Terms:
    """What every oracle is made from.

    Attributes:
      max_trials: how many sets of values are tried.
      epochs: of a whole training; None where the configuration does not say.
      seed: of the search.
      may_grow: whether trials may ask for hyperparameters that are not known yet.
    """

    hyperparameters: keras_tuner.HyperParameters
    objective: Objective
    max_trials: int | None
    epochs: int | None
    seed: int
    may_grow: bool = False
