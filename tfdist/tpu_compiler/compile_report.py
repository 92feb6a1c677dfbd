"""What the TPU compiler found, in figures and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.telemetry.console.console_text import align_columns, in_bytes
from tfdist.tpu_compiler.devices import Slice

HEADERS = (
    *("slice", "step", "cores", "batch/core", "largest", "collectives", "sum", "memory", "of", "padding", "flops"),
    *("at least", "peak"),
)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step that compiled; bytes, flops and seconds are of one core and one step.

    Attributes:
      step: `TRAIN` or `EVALUATE`.
      local_batch_size: examples of a core.
      largest_local_batch_size: with which it still fits; None where nobody asked.
      num_parameters, parameter_bytes: of the model's variables.
      slot_bytes: of the optimizer's; an evaluation has none.
      batch_bytes: of a core's batch.
      collectives: the kind of each, and the bytes that a core gives to it.
      argument_bytes: variables and batch, as the chip lays them out, in tiles.
      temporary_bytes: the most that is alive besides.
    """

    slice: Slice
    step: str
    local_batch_size: int
    largest_local_batch_size: int | None
    num_parameters: int
    parameter_bytes: int
    slot_bytes: int
    batch_bytes: int
    collectives: Sequence[dict[str, Any]]
    argument_bytes: int
    temporary_bytes: int
    flops: float
    bytes_accessed: float

    @property
    def memory_bytes(self) -> int:
        """New values of variables take the place of the old ones, so outputs do not count."""
        return self.argument_bytes + self.temporary_bytes

    @property
    def padding(self) -> float:
        """The share by which tiles enlarge variables and batch."""
        return self.argument_bytes / (self.parameter_bytes + self.slot_bytes + self.batch_bytes) - 1

    @property
    def seconds(self) -> float:
        """The least that the chip's peak rates allow."""
        return max(self._seconds_computing, self.bytes_accessed / self.slice.chip.memory_bytes_per_second)

    @property
    def _seconds_computing(self) -> float:
        return self.flops / self.slice.chip.flops["bfloat16"]

    @property
    def share_of_peak(self) -> float:
        """Returns the share of the chip's rate that a step of at most `seconds` reaches."""
        return self._seconds_computing / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        return {
            **dataclasses.asdict(self),
            "slice": self.slice.topology,
            "num_cores": self.slice.num_cores,
            "chip_bytes": int(self.slice.chip.memory_bytes),
            "padding": self.padding,
            "memory_bytes": self.memory_bytes,
            "least_seconds": self.seconds,
            "share_of_peak": self.share_of_peak,
        }


def format_table(found: Sequence[CompiledStep]) -> str:
    """A line for each slice; what it shows is of one core and one step."""
    return align_columns([HEADERS, *map(_row, found)], HEADERS)


def _row(each: CompiledStep) -> tuple[str, ...]:
    kinds = [collective["kind"] for collective in each.collectives]
    return (
        each.slice.topology,
        each.step,
        str(each.slice.num_cores),
        str(each.local_batch_size),
        "–" if each.largest_local_batch_size is None else str(each.largest_local_batch_size),
        ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "none",
        in_bytes(sum(collective["bytes"] for collective in each.collectives)),
        in_bytes(each.memory_bytes),
        f"{each.slice.chip.memory_gib:g} GiB",
        f"{100 * each.padding:.0f} %",
        f"{each.flops:.3g}",
        f"{1e6 * each.seconds:.3g} µs",
        f"{100 * each.share_of_peak:.2g} %",
    )
