"""Accelerators and slices of TPUs: the table configs/hardware/devices.toml, and how many cores a slice has."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence

from tfdist.errors import UserError, suggest
from tfdist.settings.checks import number

TABLE = pathlib.Path(__file__).parents[1] / "configs" / "hardware" / "devices.toml"
GIB = 1 << 30
RATE = number(1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as its maker states it; the table says where.

    Attributes:
      flops: operations a second at the most, by precision.
      link_bytes_per_second: each way, to the others of its machine or slice.
      network_bytes_per_second: its share of the machine's network; None: not known.
      network: by what technology it reaches a device's memory without the processor; None: by none.
      per_machine: how many a machine or a slice has at the most.
      usd_per_hour: of one; None: not known.
      names: parts of what the driver calls it.
    """

    kind: str
    memory_gib: float
    flops: Mapping[str, float]
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float | None = None
    network: str | None = None
    per_machine: int
    usd_per_hour: float | None = None
    names: Sequence[str] = ()
    is_tpu: bool = False

    @property
    def num_axes(self) -> int:
        """Sizes of the topology of a TPU's slice."""
        return 3 if self.kind in ("v4", "v5p") else 2

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    def bytes_per_second(self, count: int) -> float | None:
        """Returns the rate of a ring over so many devices; None where it crosses an unknown network."""
        return self.link_bytes_per_second if count <= self.per_machine else self.network_bytes_per_second


def read_devices(path: str | None = None) -> dict[str, Device]:
    """The table, by kind. Raises UserError where a table of the user's own cannot be read."""
    try:
        table = tomllib.loads(pathlib.Path(path or TABLE).read_text(encoding="utf-8"))
        devices = {kind: Device(kind=kind, **row) for kind, row in table.items()}
        rates = {f"{kind}.flops.{name}": rate for kind, each in devices.items() for name, rate in each.flops.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--hardware={path} is no table of devices: {error}. Write one as {TABLE} is.") from error
    needed = ("memory_gib", "memory_bytes_per_second", "link_bytes_per_second", "per_machine")
    rates |= {f"{kind}.{name}": getattr(each, name) for kind, each in devices.items() for name in needed}
    for name, rate in rates.items():
        RATE(f"--hardware={path}: {name}", rate)
    return devices


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice; each chip counts as one core.

    Attributes:
      topology: as in "v5e:2x4".
    """

    topology: str
    chip: Device
    num_cores: int


def parse_slice(topology: str) -> Slice:
    """Parses the name of a TPU slice, such as "v5e:2x4"; raises UserError if there is no such slice."""
    kind, _, sizes = topology.partition(":")
    chips = {name: device for name, device in read_devices().items() if device.is_tpu}
    if kind not in chips:
        raise UserError(
            f"--compile_for={topology} names no TPU that the compiler knows: {', '.join(chips)}.{suggest(kind, chips)} "
            "Write, for example, --compile_for=v5e:2x4"
        )
    num_axes = chips[kind].num_axes
    example = "x".join(["2", "2", "1"][:num_axes])
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != num_axes:
        raise UserError(
            f"--compile_for={topology}: a slice of {kind} has {num_axes} sizes. Write, for example, "
            f"--compile_for={kind}:{example}"
        )
    return Slice(topology, chips[kind], math.prod(map(int, sizes.split("x"))))
