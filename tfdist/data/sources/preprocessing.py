"""What a source does to raw inputs before a model sees them, for exports; and what it has fitted, read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfdist.storage import files
from tfdist.telemetry.records import damaged, parse_record


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


_T = TypeVar("_T")


def read_kept(path: str, understand: Callable[[dict[str, Any]], _T]) -> _T:
    """What `understand` makes of the JSON object in a file.

    Args:
      understand: raises KeyError, TypeError or ValueError for what is not as a source leaves it.

    Raises:
      UserError: it cannot be understood.
    """
    try:
        return understand(parse_record(path, files.read(path), dict[str, Any]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, str(error)) from error
