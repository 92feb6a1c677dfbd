"""What this machine gives a process: shared memory, open files, locked memory, devices, adapters, the place of a run.

NCCL's variables are described at https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.doctor.findings import PROBLEM, WARNING, Finding, ok_finding
from tfdist.errors import TfdistError, UserError
from tfdist.storage import files, troubles
from tfdist.strategies.cluster import environment

GROUP = "machine"
SHARED_MEMORY = Path("/dev/shm")
GIBIBYTE = 1 << 30
ENOUGH_SHARED_BYTES = GIBIBYTE
FEW_FILES, ENOUGH_FILES = 256, 4096
GPUS_OF_DRIVER = Path("/proc/driver/nvidia/gpus")
INFINIBAND = Path("/sys/class/infiniband")
MEBIBYTES = 4  # that are written and read


def check_machine(*, shared_memory: Path = SHARED_MEMORY, has_rdma: bool = False) -> list[Finding]:
    """Whether shared memory, open files and locked memory (for RDMA) suffice."""
    findings = [_check_shared_memory(shared_memory), _check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))]
    if has_rdma:
        findings.append(_check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    return findings


def _check_shared_memory(directory: Path) -> Finding:
    try:
        about = os.statvfs(directory)
        free = about.f_bavail * about.f_frsize
    except OSError:  # it is not there
        free = 0
    what = f"{directory} has {free / GIBIBYTE:.2f} GiB free"
    if free >= ENOUGH_SHARED_BYTES:
        return ok_finding(GROUP, what, shared_bytes=free)
    why = (
        "NCCL and Horovod pass data between processes of a machine through it and fail, some with a bus error, when it "
        "is full. Docker gives 64 MiB by itself."
    )
    hint = "Give the container more: docker run --shm-size=2g, or sizeLimit of its /dev/shm in a pod."
    return Finding(WARNING, GROUP, what, why, hint, {"shared_bytes": free})


def _check_open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        shown = "any number of" if soft == resource.RLIM_INFINITY else soft
        return ok_finding(GROUP, f"{shown} open files are allowed", open_files=soft)
    why = (
        "Connections to the other workers, a bucket and data files all count; past the limit a run ends with 'Too many "
        "open files', often hours after its start."
    )
    hint = f"Run before it: ulimit -n {hard if hard != resource.RLIM_INFINITY else 65536}"
    level = PROBLEM if soft < FEW_FILES else WARNING
    return Finding(level, GROUP, f"only {soft} open files are allowed", why, hint, {"open_files": soft})


def _check_locked_memory(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return ok_finding(GROUP, "memory can be locked without a limit, as RDMA wants it")
    why = "RDMA registers memory by locking it; NCCL then fails with 'ibv_reg_mr failed' or goes by TCP."
    hint = "Run: ulimit -l unlimited (docker run --ulimit=memlock=-1; under Slurm, slurmd's LimitMEMLOCK=infinity)."
    return Finding(WARNING, GROUP, f"only {soft // 1024} KiB of memory can be locked", why, hint)


def check_devices(variables: Mapping[str, str]) -> tuple[list[Finding], int]:
    """Compares TensorFlow's devices with the driver's and the environment's; returns findings and number of GPUs."""
    import tensorflow as tf

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
        findings.append(Finding(PROBLEM, "devices", what, why, hint))
    mark = environment.first_set(environment.TPU_MARKS, variables)
    if mark and not found["TPU"]:
        what = f"{mark} is set and TensorFlow lists no TPU"
        hint = "On a TPU VM run: pip install 'tfdist[tpu]' (docs/tpu.md). Elsewhere unset the variable."
        findings.append(Finding(PROBLEM, "devices", what, "The strategy `auto` would choose the TPU and end.", hint))
    shown = [f"{len(devices)} {kind}{'s' * (len(devices) > 1)}" for kind, devices in found.items() if devices]
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in found["GPU"]]
    kinds = f" ({', '.join(sorted(set(names)))})" if names else ""
    counts = {kind: len(devices) for kind, devices in found.items()}
    return [*findings, ok_finding("devices", ", ".join(shown) + kinds, **counts)], counts["GPU"]


def list_adapters(directory: Path = INFINIBAND) -> list[Path]:
    """The ports of InfiniBand and RoCE adapters, as Linux tells of them."""
    return sorted(directory.glob("*/ports/*"))


def check_network(variables: Mapping[str, str], *, num_gpus: int, adapters: Sequence[Path]) -> list[Finding]:
    """Findings about what carries the collectives; without any GPU, what only NCCL needs is left out."""
    active = [port for port in adapters if "ACTIVE" in _read_text(port / "state")]
    findings = []
    if active:
        shown = ", ".join(f"{p.parents[1].name} port {p.name} ({_read_text(p / 'link_layer')})" for p in active)
        findings.append(ok_finding("network", f"RDMA adapters: {shown}"))
    elif adapters:
        what = f"{len(adapters)} ports of RDMA adapters are there and none is active"
        why = "NCCL then goes by TCP, several times slower."
        hint = "See `ibstat`: is the cable in, does a subnet manager run?"
        findings.append(Finding(WARNING, "network", what, why, hint))
    disabled = variables.get("NCCL_IB_DISABLE") or "0"
    if num_gpus and active and disabled != "0":
        what = f"NCCL_IB_DISABLE={disabled} with {len(active)} active RDMA ports"
        why = "NCCL leaves the adapters alone and goes by TCP, several times slower."
        hint = "Unset NCCL_IB_DISABLE, or set it to 0, on all workers."
        findings.append(Finding(WARNING, "network", what, why, hint))
    nccl = {name: value for name, value in sorted(variables.items()) if name.startswith("NCCL_")}
    shown = ", ".join(f"{name}={value}" for name, value in nccl.items()) or "no NCCL_ variable is set"
    uses = "" if num_gpus else "; without a GPU NCCL is not used"
    return [*findings, ok_finding("network", shown + uses, nccl=nccl, infiniband=[str(port) for port in active])]


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_storage(path: str) -> Finding:
    """Writes, reads and deletes some megabytes below `path`; leaves nothing."""
    name = files.join(path, f".doctor-{uuid.uuid4().hex[:12]}")
    data = os.urandom(MEBIBYTES << 20)
    try:
        troubles.check_writable(path)
        try:
            moments = [time.perf_counter()]
            files.write_new(name, [memoryview(data)])
            moments.append(time.perf_counter())
            is_same = files.read(name) == data
            moments.append(time.perf_counter())
        finally:
            files.remove(name)
        moments.append(time.perf_counter())
        problem = "" if is_same else "gave back other bytes"
        problem = "keeps a deleted file" if files.exists(name) else problem
    except UserError as error:
        return _build_problem(path, str(error))
    except (OSError, TfdistError) as error:
        problem = " ".join(str(error).split())
    if problem:
        return _build_problem(path, f"{path!r}: {problem}")
    write, read, delete = (after - before for before, after in itertools.pairwise(moments))
    rates = f"written at {MEBIBYTES / write:,.0f} MiB/s, read at {MEBIBYTES / read:,.0f} MiB/s"
    seconds = {"write": write, "read": read, "delete": delete}
    return ok_finding("storage", f"{path}: {rates}, deleted in {delete * 1e3:.0f} ms", path=path, seconds=seconds)


def _build_problem(path: str, what: str) -> Finding:
    why = "Checkpoints, logs and the result of a run are written there; a run checks it too and ends before it trains."
    hint = "Mend what the message names, or give another --run_dir."
    return Finding(PROBLEM, "storage", what, why, hint, {"path": path})
