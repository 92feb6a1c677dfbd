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
    """Attributes: memory in GiB, operations and bytes of memory a second at the most, sizes of a slice's topology."""

    memory_gib: float
    flops_per_second: float
    bytes_per_second: float
    num_axes: int


CHIPS = {
    "v4": Chip(32, 275e12, 1228e9, 3),
    "v5e": Chip(16, 197e12, 819e9, 2),
    "v5p": Chip(95, 459e12, 2765e9, 3),
    "v6e": Chip(32, 918e12, 1640e9, 2),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice, whose chips count as one core each.

    Attributes:
      topology: as in "v5e:2x4".
    """

    topology: str
    chip: Chip
    num_cores: int


def parse_slice(topology: str) -> Slice:
    """Raises UserError where there is no such slice."""
    kind, _, sizes = topology.partition(":")
    if kind not in CHIPS:
        raise UserError(
            f"--compile_for={topology} names no TPU that the compiler knows: {', '.join(CHIPS)}.{suggest(kind, CHIPS)} "
            "Write, for example, --compile_for=v5e:2x4"
        )
    num_axes = CHIPS[kind].num_axes
    example = "x".join(["2", "2", "1"][:num_axes])
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != num_axes:
        raise UserError(
            f"--compile_for={topology}: a slice of {kind} has {num_axes} sizes. Write, for example, "
            f"--compile_for={kind}:{example}"
        )
    return Slice(topology, CHIPS[kind], math.prod(map(int, sizes.split("x"))))
