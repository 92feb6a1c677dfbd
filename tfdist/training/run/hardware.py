"""What the chief's process computes on, for result.json.

Invariant: tells what this process may use, not what the machine has: processors by its affinity, devices as TensorFlow
shows them.
"""

from __future__ import annotations

import collections
import os
from typing import Any

import tensorflow as tf


def describe_hardware() -> dict[str, Any]:
    """Devices by kind, their names, processors, and bytes of memory (None where the system does not tell)."""
    devices = tf.config.list_logical_devices()
    kinds = collections.Counter(device.device_type for device in devices)
    accelerators = [device for device in tf.config.get_visible_devices() if device.device_type != "CPU"]
    names = [tf.config.experimental.get_device_details(device).get("device_name") for device in accelerators]
    return {
        "devices": dict(sorted(kinds.items())),
        "accelerators": dict(collections.Counter(name for name in names if name)),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
