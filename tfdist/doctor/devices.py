"""Which devices TensorFlow finds. Imports TensorFlow, which the caller has quieted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from tfdist.doctor.findings import PROBLEM, Finding, fine
from tfdist.strategies.cluster import environment

GROUP = "devices"
GPUS_OF_DRIVER = Path("/proc/driver/nvidia/gpus")


def check_devices(variables: Mapping[str, str]) -> tuple[list[Finding], int]:
    """Findings, and the number of GPUs."""
    found = {kind: tf.config.list_physical_devices(kind) for kind in ("CPU", "GPU", "TPU")}
    gpus_there = len(list(GPUS_OF_DRIVER.glob("*"))) if variables.get("CUDA_VISIBLE_DEVICES") != "" else 0
    findings = []
    if gpus_there > len(found["GPU"]):
        what = f"NVIDIA's driver has {gpus_there} GPUs and TensorFlow finds {len(found['GPU'])}"
        why = "The run would train on what TensorFlow finds, in the worst case the CPU."
        hint = (
            "Set TF_CPP_MIN_LOG_LEVEL=0 and run the doctor again: TensorFlow says which library it misses. CUDA's come "
            "with: pip install 'tfdist[gpu]'. Is CUDA_VISIBLE_DEVICES set?"
        )
        findings.append(Finding(PROBLEM, GROUP, what, why, hint))
    mark = environment.first_set(environment.TPU_MARKS, variables)
    if mark and not found["TPU"]:
        what = f"{mark} is set and TensorFlow lists no TPU"
        hint = "On a TPU VM run: pip install 'tfdist[tpu]' (docs/tpu.md). Elsewhere unset the variable."
        findings.append(Finding(PROBLEM, GROUP, what, "The strategy `auto` would choose the TPU and end.", hint))
    shown = [f"{len(devices)} {kind}{'s' * (len(devices) > 1)}" for kind, devices in found.items() if devices]
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in found["GPU"]]
    kinds = f" ({', '.join(sorted(set(names)))})" if names else ""
    counts = {kind: len(devices) for kind, devices in found.items()}
    return [*findings, fine(GROUP, ", ".join(shown) + kinds, **counts)], counts["GPU"]
