"""What a chip of each kind of TPU has, and how many cores a slice has.

Peak rates and memory are those of Google's pages on the TPU versions (cloud.google.com/tpu/docs), of a chip and in
bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
import re

from tfdist.errors import UserError, suggest


@dataclasses.dataclass(frozen=True)
class Chip:
    """Attributes: memory in GiB, peak rate in floating-point operations a second, memory rate in bytes a second."""

    memory_gib: float
    flops_per_second: float
    bytes_per_second: float


CHIPS = {
    "v4": Chip(32, 275e12, 1228e9),
    "v5e": Chip(16, 197e12, 819e9),
    "v5p": Chip(95, 459e12, 2765e9),
    "v6e": Chip(32, 918e12, 1640e9),
}
_AXES = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice, whose chips count as one core each.

    Attributes:
      topology: as in "v5e:2x4".
    """

    topology: str
    chip: Chip
    num_cores: int


def slice_of(topology: str) -> Slice:
    """Raises UserError where there is no such slice."""
    kind, _, sizes = topology.partition(":")
    if kind not in CHIPS:
        raise UserError(
            f"--compile_for={topology} names no TPU that the compiler knows: {', '.join(CHIPS)}.{suggest(kind, CHIPS)} "
            "Write, for example, --compile_for=v5e:2x4"
        )
    example = "x".join(["2"] * min(2, _AXES[kind]) + ["1"] * (_AXES[kind] - 2))
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != _AXES[kind]:
        raise UserError(
            f"--compile_for={topology}: a slice of {kind} has {_AXES[kind]} sizes. Write, for example, "
            f"--compile_for={kind}:{example}"
        )
    return Slice(topology, CHIPS[kind], math.prod(map(int, sizes.split("x"))))
