"""How the GPUs of a machine are shared out, to trials and to the processes of one."""

from __future__ import annotations

from collections.abc import Sequence

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def shares(devices: Sequence[str], count: int) -> list[list[str]]:
    """The devices dealt to `count` places in equal parts; one is shared only if there are too few."""
    if count > len(devices):
        return [[devices[index % len(devices)]] for index in range(count)]
    size = len(devices) // count
    return [list(devices[index * size : (index + 1) * size]) for index in range(count)]
