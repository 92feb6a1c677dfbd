"""Samples what a process uses, and where its time went, on a thread of its own.

Invariant: training never waits for it, and it never ends a training. Samples come every ten seconds, and the last one
at the end. RUN_DIR/telemetry/worker-N.jsonl, from which reports are drawn, has all of an hour and then one for every
360th of the time so far, so that a run of a month leaves some 3,000 lines. `open_run` begins it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil
import tensorflow as tf

from tfdist.telemetry.account import time_account
from tfdist.telemetry.events import EventLog, GuardedLog, time_text
from tfdist.telemetry.facts import RunFacts, Sample
from tfdist.telemetry.json_text import to_json

FIRST_SECONDS, EVERY_SECONDS, STORED_SHARE = 1.0, 10.0, 1 / 360
LOW_UTILIZATION, LOW_SECONDS = 0.8, 300.0  # a mean over so long a window


class Sampler:
    """Samples this process until it is closed.

    Args:
      run: whose process it is.
      path: of the file for its samples; None keeps none.
      events: pass on each sample, from the sampler's thread and, for the last one, from `close`; get warnings.
    """

    def __init__(self, run: RunFacts, path: str | None, events: EventLog) -> None:
        self._run = run
        self._events = events
        self._log = None if path is None else GuardedLog(path)
        self._resources = ResourceUsage()
        self._utilization: collections.deque[float] = collections.deque(maxlen=round(LOW_SECONDS / EVERY_SECONDS))
        self._has_warned = False
        self._begun = self._store_at = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_closed, name="tfdist-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes the last sample, and leaves all of them stored. Closing again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._store_at = 0.0
        self._sample()
        if self._log is not None:
            self._events.warn_of_loss(self._log.close())

    def _sample_until_closed(self) -> None:
        seconds = FIRST_SECONDS
        while not self._closing.wait(seconds):
            self._sample()
            seconds = EVERY_SECONDS

    def _sample(self) -> None:
        run, own, values = self._run, time_account.current(), self._resources.measure()
        sample = Sample(
            worker=run.worker, start=run.start, step=own.step, seconds=own.seconds(), values=values, process=own.id
        )
        moment = time.monotonic()
        if self._log is not None and moment >= self._store_at:
            self._events.warn_of_loss(self._log.write_line(sample_line(sample)))
            self._store_at = moment + (moment - self._begun) * STORED_SHARE
        self._events.dispatch(sample)
        self._watch(sample.values)

    def _watch(self, values: Mapping[str, float]) -> None:
        """Warns once of GPUs that have had too little to do for some minutes."""
        if (utilization := values.get("gpu_utilization")) is None:
            return
        self._utilization.append(utilization)
        mean = sum(self._utilization) / len(self._utilization)
        if len(self._utilization) == self._utilization.maxlen and mean < LOW_UTILIZATION and not self._has_warned:
            self._has_warned = True
            self._events.warning(
                "gpu_util_low",
                message=f"The GPUs of worker {self._run.worker} computed {mean:.0%} of the time for "
                f"{LOW_SECONDS / 60:.0f} minutes, less than {LOW_UTILIZATION:.0%}. The report's time account says what "
                "they wait for.",
            )


def sample_line(sample: Sample) -> str:
    """The line that the file has of a sample."""
    seconds = {share: round(seconds, 4) for share, seconds in sample.seconds.items()}
    return to_json({**vars(sample), "time": time_text(sample.time), "seconds": seconds})


class ResourceUsage:
    """The use of this process, its GPUs and its network cards, under the names of `registry.METRICS`.

    Invariant: a measurement takes about a millisecond and creates no device, no CUDA context and no TensorFlow
    operation. What the system does not report is absent.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the next one tells of the time from now on
        self._processors = len(self._process.cpu_affinity()) if hasattr(self._process, "cpu_affinity") else 1
        self._network = psutil.net_io_counters()
        self._gpus = _Gpus() if tf.config.list_logical_devices("GPU") else None

    def measure(self) -> dict[str, float]:
        """Measures the use at this moment."""
        figures = {
            "host_memory_bytes": float(self._process.memory_info().rss),
            "cpu_utilization": self._process.cpu_percent() / 100 / self._processors,
        }
        with contextlib.suppress(psutil.AccessDenied, AttributeError):
            stored = self._process.io_counters()
            figures |= {"storage_read_bytes": stored.read_bytes, "storage_written_bytes": stored.write_bytes}
        network = psutil.net_io_counters()
        if network is not None and self._network is not None:
            figures["network_sent_bytes"] = network.bytes_sent - self._network.bytes_sent
            figures["network_received_bytes"] = network.bytes_recv - self._network.bytes_recv
        for key, name in (("current", "device_memory_bytes"), ("peak", "device_memory_peak_bytes")):
            if (used := device_memory_bytes(key)) is not None:
                figures[name] = used
        return figures | ({} if self._gpus is None else self._gpus.measure())


def device_memory_bytes(key: str = "current") -> float | None:
    """Bytes in use on this process's GPUs ("current"), or the most that were ("peak"); None where it has none."""
    gpus = [name for name in list_local_devices() if name.startswith("GPU:")]
    if not gpus:
        return None
    return float(sum(tf.config.experimental.get_memory_info(name)[key] for name in gpus))


def list_local_devices() -> list[str]:
    """Names, "GPU:0", of this process's logical devices. TensorFlow lists those of all workers, by their tasks."""
    return sorted({device.name.rpartition("/device:")[2] for device in tf.config.list_logical_devices()})


class _Gpus:
    """NVIDIA's GPUs on which this process computes, as NVML sees them; all of the machine where it sees no processes.

    Without NVML there is nothing.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        with contextlib.suppress(ImportError):
            import pynvml

            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml

    def measure(self) -> dict[str, float]:
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
