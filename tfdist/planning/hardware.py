"""The devices that a plan may choose from: what `--devices` names of the table, at the prices of `--prices`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from tfdist.errors import UserError, suggest
from tfdist.tpu_compiler.devices import Device

COUNTS = (1, 2, 4, 8)  # that are looked at where no number is given


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
