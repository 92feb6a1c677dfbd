"""Numbers of bytes as people read them."""

from __future__ import annotations

UNITS = ("KiB", "MiB", "GiB", "TiB")


def in_bytes(count: float) -> str:
    """ "1.5 KiB", "64 MiB": to a tenth of the largest unit that there is one of."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in UNITS:
        count /= 1024
        if count < 1024 or unit == UNITS[-1]:
            break
    return f"{count:.1f}".removesuffix(".0") + f" {unit}"
