"""What this machine gives a process: shared memory, open files, locked memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from tfdist.doctor.findings import PROBLEM, WARNING, Finding, fine

GROUP = "machine"
SHARED_MEMORY = Path("/dev/shm")
GIBIBYTE = 1 << 30
ENOUGH_SHARED_BYTES = GIBIBYTE
FEW_FILES, ENOUGH_FILES = 256, 4096


def check_machine(*, shared_memory: Path = SHARED_MEMORY, has_rdma: bool = False) -> list[Finding]:
    """Whether shared memory, open files and locked memory (for RDMA) suffice."""
    findings = [_shared_memory(shared_memory), _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))]
    if has_rdma:
        findings.append(_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    return findings


def _shared_memory(directory: Path) -> Finding:
    try:
        about = os.statvfs(directory)
        free = about.f_bavail * about.f_frsize
    except OSError:  # it is not there
        free = 0
    what = f"{directory} has {free / GIBIBYTE:.2f} GiB free"
    if free >= ENOUGH_SHARED_BYTES:
        return fine(GROUP, what, shared_bytes=free)
    why = (
        "NCCL and Horovod pass data between processes of a machine through it and fail, some with a bus error, when it "
        "is full. Docker gives 64 MiB by itself."
    )
    hint = "Give the container more: docker run --shm-size=2g, or sizeLimit in examples/clusters/jobset.yaml."
    return Finding(WARNING, GROUP, what, why, hint, {"shared_bytes": free})


def _open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        shown = "any number of" if soft == resource.RLIM_INFINITY else soft
        return fine(GROUP, f"{shown} open files are allowed", open_files=soft)
    why = (
        "Connections to the other workers, a bucket and data files all count; past the limit a run ends with 'Too many "
        "open files', often hours after its start."
    )
    hint = f"Run before it: ulimit -n {hard if hard != resource.RLIM_INFINITY else 65536}"
    level = PROBLEM if soft < FEW_FILES else WARNING
    return Finding(level, GROUP, f"only {soft} open files are allowed", why, hint, {"open_files": soft})


def _locked_memory(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return fine(GROUP, "memory can be locked without a limit, as RDMA wants it")
    why = "RDMA registers memory by locking it; NCCL then fails with 'ibv_reg_mr failed' or goes by TCP."
    hint = "Run: ulimit -l unlimited (docker run --ulimit=memlock=-1; under Slurm, slurmd's LimitMEMLOCK=infinity)."
    return Finding(WARNING, GROUP, f"only {soft // 1024} KiB of memory can be locked", why, hint)
