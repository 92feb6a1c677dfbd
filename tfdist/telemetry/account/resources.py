"""What this process uses of its machine, under the names of `registry.METRICS`.

Invariant: a look takes about a millisecond and creates no device, no CUDA context and no TensorFlow operation. What the
system does not tell is absent. The sampler looks.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import psutil
import tensorflow as tf


class Resources:
    """Of this process, and of the GPUs and the network cards that it uses."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the next one tells of the time from now on
        self._processors = len(self._process.cpu_affinity()) if hasattr(self._process, "cpu_affinity") else 1
        self._network = psutil.net_io_counters()
        self._gpus = _Gpus() if tf.config.list_logical_devices("GPU") else None

    def look(self) -> dict[str, float]:
        """The figures of this moment."""
        found = {
            "host_memory_bytes": float(self._process.memory_info().rss),
            "cpu_utilization": self._process.cpu_percent() / 100 / self._processors,
        }
        with contextlib.suppress(psutil.AccessDenied, AttributeError):
            stored = self._process.io_counters()
            found |= {"storage_read_bytes": stored.read_bytes, "storage_written_bytes": stored.write_bytes}
        network = psutil.net_io_counters()
        if network is not None and self._network is not None:
            found["network_sent_bytes"] = network.bytes_sent - self._network.bytes_sent
            found["network_received_bytes"] = network.bytes_recv - self._network.bytes_recv
        for key, name in (("current", "device_memory_bytes"), ("peak", "device_memory_peak_bytes")):
            if (used := device_memory_bytes(key)) is not None:
                found[name] = used
        return found | ({} if self._gpus is None else self._gpus.look())


def device_memory_bytes(key: str = "current") -> float | None:
    """Bytes in use on this process's GPUs ("current"), or the most that were ("peak"); None where it has none."""
    gpus = range(len(tf.config.list_logical_devices("GPU")))
    if not gpus:
        return None
    return float(sum(tf.config.experimental.get_memory_info(f"GPU:{index}")[key] for index in gpus))


class _Gpus:
    """NVIDIA's GPUs on which this process computes, as NVML sees them; all of the machine where it sees no processes.

    Without NVML there is nothing to tell.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        with contextlib.suppress(ImportError):
            import pynvml

            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml

    def look(self) -> dict[str, float]:
        if self._nvml is None:
            return {}
        try:
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
            own = [handle for handle in handles if self._computes_on(handle)] or handles
            shares = [self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in own]
        except self._nvml.NVMLError:
            return {}
        return {"gpu_utilization": sum(shares) / len(shares)} if shares else {}

    def _computes_on(self, handle: Any) -> bool:
        return any(each.pid == os.getpid() for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
