"""The TPU slices that tfdist trains on, as Cloud TPU and GKE name them.

The names are those of https://cloud.google.com/tpu/docs/runtimes and
https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
"""

from __future__ import annotations

import dataclasses
import re

from tfdist.errors import suggest


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """A slice of one host.

    Attributes:
      runtime_version: the software that Cloud TPU puts on the VM.
      node_label: GKE's name for its kind, in cloud.google.com/gke-tpu-accelerator; None where GKE has none.
      topology: how its chips are laid, in cloud.google.com/gke-tpu-topology.
    """

    runtime_version: str
    node_label: str | None
    topology: str
    chips: int


SLICES = {
    "v2-8": TpuSlice("tpu-ubuntu2204-base", None, "2x2", 4),
    "v3-8": TpuSlice("tpu-ubuntu2204-base", None, "2x2", 4),
    "v4-8": TpuSlice("tpu-ubuntu2204-base", "tpu-v4-podslice", "2x2x1", 4),
    "v5litepod-1": TpuSlice("v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "1x1", 1),
    "v5litepod-4": TpuSlice("v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "2x2", 4),
    "v5litepod-8": TpuSlice("v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", "2x4", 8),
    "v5p-8": TpuSlice("v2-alpha-tpuv5", "tpu-v5p-slice", "2x2x1", 4),
    "v6e-1": TpuSlice("v2-alpha-tpuv6e", "tpu-v6e-slice", "1x1", 1),
    "v6e-4": TpuSlice("v2-alpha-tpuv6e", "tpu-v6e-slice", "2x2", 4),
    "v6e-8": TpuSlice("v2-alpha-tpuv6e", "tpu-v6e-slice", "2x4", 8),
}
_KINDS = sorted({name.split("-")[0] for name in SLICES})
_MOST_OF_ONE_HOST = 8  # chips, or cores where the name counts those


def has_several_hosts(text: str) -> bool:
    """Whether a slice's name is that of one of several hosts."""
    found = re.fullmatch(rf"(?:{'|'.join(_KINDS)})-([0-9]+)", text)
    return found is not None and int(found[1]) > _MOST_OF_ONE_HOST


def tpu_type(text: str) -> str:
    """Checks the name of a slice that a flag names."""
    if text in SLICES or has_several_hosts(text):
        return text
    raise ValueError(f"must be one of {', '.join(SLICES)} or a larger one; received {text!r}.{suggest(text, SLICES)}")


def gpu_or_tpu(text: str) -> str:
    """Checks an accelerator of GKE: a TPU slice, or the label of a GPU."""
    if has_several_hosts(text):
        raise ValueError(
            f"{text} has several hosts; on GKE tfdist trains on the TPUs of one. Write one of {', '.join(SLICES)}"
        )
    if re.match(r"v[0-9]", text):
        return tpu_type(text)
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise ValueError(
            f"must be a GPU as GKE labels it, such as nvidia-l4, or a TPU such as v5litepod-8; received {text!r}"
        )
    return text
