"""The devices that a plan may choose from: configs/hardware/devices.toml, and what `--devices` names of it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence

from tfdist.errors import UserError, suggest

TABLE = pathlib.Path(__file__).parents[1] / "configs" / "hardware" / "devices.toml"
GIB = 1 << 30
COUNTS = (1, 2, 4, 8)  # that are looked at where no number is given


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as its maker states it; the table says where.

    Attributes:
      flops: operations a second at the most, by precision.
      link_bytes_per_second: each way, to the others of its machine or slice.
      network_bytes_per_second: its share of the machine's network; None: not known.
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
    per_machine: int
    usd_per_hour: float | None = None
    names: Sequence[str] = ()
    is_tpu: bool = False

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    def bytes_per_second(self, count: int) -> float | None:
        """Of a ring over so many of them; None where it goes through a network that is not known."""
        return self.link_bytes_per_second if count <= self.per_machine else self.network_bytes_per_second


@dataclasses.dataclass(frozen=True)
class Group:
    """So many devices of one kind."""

    device: Device
    count: int

    def __str__(self) -> str:
        return f"{self.device.kind}:{self.count}"

    @property
    def num_machines(self) -> int:
        """Machines, or slices of TPUs."""
        return math.ceil(self.count / self.device.per_machine)

    @property
    def usd_per_hour(self) -> float | None:
        """Of all of them; None: nobody said what one costs."""
        price = self.device.usd_per_hour
        return None if price is None else self.count * price


def read_devices(path: str | None = None) -> dict[str, Device]:
    """The table, by kind. Raises UserError where a table of the user's own cannot be read."""
    try:
        table = tomllib.loads(pathlib.Path(path or TABLE).read_text(encoding="utf-8"))
        return {kind: Device(kind=kind, **row) for kind, row in table.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--hardware={path} is no table of devices: {error}. Write one as {TABLE} is.") from error


def parse_groups(texts: Sequence[str], known: Mapping[str, Device]) -> list[Group]:
    """What `--devices` names, 'a100_40:8' or 'v5e' for several numbers of it; all, where it names nothing."""
    found = []
    for text in [part for given in texts for part in given.split(",")] or list(known):
        kind, _, number = text.partition(":")
        if kind not in known:
            raise UserError(f"--devices={text} names none of {', '.join(known)}.{suggest(kind, known)}")
        if number and not (number.isdecimal() and int(number)):
            raise UserError(f"--devices={text}: {number!r} is no number of devices. Write, for example, {kind}:8")
        counts = [int(number)] if number else [count for count in COUNTS if count <= known[kind].per_machine]
        found += [Group(known[kind], count) for count in counts]
    return found


def apply_prices(texts: Sequence[str], known: Mapping[str, Device]) -> dict[str, Device]:
    """The devices with what `--prices` says that one costs for an hour, in US dollars: 'a100_40=3.67'."""
    found = dict(known)
    for text in [part for given in texts for part in given.split(",")]:
        kind, _, amount = text.partition("=")
        if kind not in known:
            raise UserError(f"--prices={text} names none of {', '.join(known)}.{suggest(kind, known)}")
        if not re.fullmatch(r"\d+(\.\d*)?", amount):
            raise UserError(f"--prices={text}: {amount!r} is no price. Write dollars for an hour of one, {kind}=1.20")
        found[kind] = dataclasses.replace(known[kind], usd_per_hour=float(amount))
    return found
