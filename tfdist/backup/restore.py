"""Reads backups: the newest that verifies, or a named one, and fits its tensors to what a program wants.

Invariant: no byte is used before the size and the CRC32C of every file of the backup were found right. The training
loop restores through this; so do fine-tuning and `python -m tfdist.backup`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfdist.backup.keeper import Teller
from tfdist.backup.state import State


def newest(directory: str, *, tell: Teller, before_step: int | None = None) -> State | None:
    """The newest state that verifies (of a step below `before_step`); None when there is none.

    One warning for each damaged backup that is passed over, naming the file and what was wrong.
    """
    raise NotImplementedError


def load(path: str, *, verify: bool = True) -> State:
    """The state in one backup's directory; raises `manifest.Damaged` naming the file and what was wrong."""
    raise NotImplementedError


def match(
    tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[tuple[int, ...], str]], *, partial: bool
) -> dict[str, np.ndarray]:
    """Those of `tensors` that `wanted` (name → shape, dtype) names.

    Raises UserError listing every difference, unless `partial`: then what differs is left out.
    """
    raise NotImplementedError
