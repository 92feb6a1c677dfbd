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
    except OSError as error:
        return Finding(
            WARNING,
            GROUP,
            f"{directory} cannot be looked at: {error.strerror}",
            "NCCL and Horovod pass data between processes of a machine through it.",
            "Mount a tmpfs there: docker run --shm-size=2g, or for Kubernetes as in examples/clusters/jobset.yaml.",
        )
    free = about.f_bavail * about.f_frsize
    if free >= ENOUGH_SHARED_BYTES:
        return fine(GROUP, f"{directory} has {free / GIBIBYTE:.1f} GiB free", shared_bytes=free)
    return Finding(
        WARNING,
        GROUP,
        f"{directory} has only {free / GIBIBYTE:.2f} GiB free",
        "NCCL and Horovod pass data between processes of a machine through it and fail, some with a bus error, when it "
        "is full. Docker gives 64 MiB by itself.",
        "Give the container more: docker run --shm-size=2g, or sizeLimit in examples/clusters/jobset.yaml.",
        {"shared_bytes": free},
    )


def _open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return fine(GROUP, f"{_shown(soft)} open files are allowed", open_files=soft)
    return Finding(
        PROBLEM if soft < FEW_FILES else WARNING,
        GROUP,
        f"only {_shown(soft)} open files are allowed",
        "Connections to the other workers, a bucket and data files all count; past the limit a run ends with 'Too many "
        "open files', often hours after its start.",
        f"Run: ulimit -n {_shown(hard) if hard != resource.RLIM_INFINITY else 65536} before it"
        + ("." if hard == resource.RLIM_INFINITY or hard >= ENOUGH_FILES else ", and have the hard limit raised."),
        {"open_files": soft},
    )


def _locked_memory(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return fine(GROUP, "memory can be locked without a limit, as RDMA wants it")
    return Finding(
        WARNING,
        GROUP,
        f"only {soft // 1024} KiB of memory can be locked",
        "RDMA registers memory by locking it; NCCL then fails with 'ibv_reg_mr failed' or goes by TCP.",
        "Run: ulimit -l unlimited (docker run --ulimit=memlock=-1; under Slurm, slurmd's LimitMEMLOCK=infinity).",
    )


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
