"""The devices that a plan may choose from: configs/hardware/devices.toml, and what `--devices` names of it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
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
      usd_per_hour, spot_usd_per_hour: of one, on demand and as long as nobody else wants it; None: not known.
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
    spot_usd_per_hour: float | None = None
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
    """So many devices of one kind, on demand or as spot machines."""

    device: Device
    count: int
    is_spot: bool = False

    def __str__(self) -> str:
        return f"{self.device.kind}:{self.count}{' spot' if self.is_spot else ''}"

    @property
    def num_machines(self) -> int:
        """Machines, or slices of TPUs, each of which may be taken away by itself."""
        return math.ceil(self.count / self.device.per_machine)

    @property
    def usd_per_hour(self) -> float | None:
        """Of all of them; None: nobody said what one costs."""
        price = self.device.spot_usd_per_hour if self.is_spot else self.device.usd_per_hour
        return None if price is None else self.count * price


def devices(path: str | None = None) -> dict[str, Device]:
    """The table, by kind. Raises UserError where a table of the user's own cannot be read."""
    try:
        table = tomllib.loads(pathlib.Path(path or TABLE).read_text(encoding="utf-8"))
        return {kind: Device(kind=kind, **row) for kind, row in table.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--hardware={path} is no table of devices: {error}. Write one as {TABLE} is.") from error


def groups(texts: Sequence[str], known: Mapping[str, Device]) -> list[Group]:
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


def priced(texts: Sequence[str], known: Mapping[str, Device]) -> dict[str, Device]:
    """The devices with what `--prices` says that one costs for an hour, in US dollars: 'a100_40=3.67/1.80'."""
    found = dict(known)
    for text in [part for given in texts for part in given.split(",")]:
        kind, _, amounts = text.partition("=")
        if kind not in known:
            raise UserError(f"--prices={text} names none of {', '.join(known)}.{suggest(kind, known)}")
        on_demand, *spot = (_price(amount) for amount in amounts.split("/"))
        if on_demand is None or len(spot) > 1 or None in spot:
            raise UserError(
                f"--prices={text}: {amounts!r} is no price. Write dollars for an hour of one, {kind}=1.20, or with "
                f"that of a spot machine, {kind}=1.20/0.45"
            )
        found[kind] = dataclasses.replace(
            known[kind], usd_per_hour=on_demand, spot_usd_per_hour=spot[0] if spot else None
        )
    return found


def _price(text: str) -> float | None:
    try:
        amount = float(text)
    except ValueError:
        return None
    return amount if 0 <= amount < math.inf else None
