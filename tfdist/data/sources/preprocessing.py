"""What a source does to raw inputs before a model sees them, for exports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """From what a program has, to what a model takes.

    Attributes:
      inputs: what the program gives, by name, with a batch axis.
      function: from a dict of these to the x of an example.
      kept: holds its tables, which an export has to keep.
      first: the raw inputs of so many examples, the first in their own order.
    """

    inputs: Mapping[str, tf.TensorSpec]
    function: Callable[[Mapping[str, tf.Tensor]], Any]
    kept: tf.Module
    first: Callable[[int], Mapping[str, np.ndarray]]
