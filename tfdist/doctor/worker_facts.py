"""What a worker tells the others of itself, and what must be alike on all of them.

Invariant: facts hold names, versions and digests, and of settings their text; never the value of a variable.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.doctor.findings import NOTE, PROBLEM, WARNING, Finding, ok_finding
from tfdist.errors import shorten_list

GROUP = "workers"
PACKAGE = Path(__file__).resolve().parents[1]
MOST_SHOWN = 8
# Differences in these make collectives differ or code behave otherwise; others may be there on one machine only.
MUST_AGREE = ("python", "tensorflow", "keras", "numpy", "horovod")
# Of each kind of facts: why a difference matters, and what to do.
ADVICE = {
    "versions": (
        "Each release may order its collectives, name its variables and round in its own way.",
        "Install the same on all machines.",
    ),
    "code": (
        "Workers that run other code wait in other collectives, which hangs or gives wrong sums.",
        "Put one commit, or one image, on all machines.",
    ),
    "settings": (
        "Workers with other settings train another model or wait in other collectives.",
        "Give all workers the same gin files and --gin_param.",
    ),
    "devices": (
        "MultiWorkerMirroredStrategy takes all GPUs of each machine and wants the same number of each.",
        "Hide the surplus, CUDA_VISIBLE_DEVICES=0,1, or see what `devices` says on the machine with fewer.",
    ),
}


def collect(*, versions: Mapping[str, str], settings: Mapping[str, str] | None, num_devices: int) -> dict[str, Any]:
    """Collects this worker's facts; `settings` is None where no gin file was given."""
    return {
        "host": socket.gethostname(),
        "versions": dict(versions),
        "code": {"tfdist": code_digest()},
        "settings": None if settings is None else dict(settings),
        "devices": {"GPUs": num_devices},
    }


def code_digest(package: Path = PACKAGE) -> str:
    """Returns a digest of tfdist's own source files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def settings_digest(settings: Mapping[str, str]) -> str:
    """Returns twelve characters that differ where two configurations differ."""
    text = "\0".join(f"{name}\0{value}" for name, value in sorted(settings.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> list[Finding]:
    """Findings about how another worker differs from this one."""
    findings = []
    who = f"{name} ({theirs['host']})"
    for kind, (why, hint) in ADVICE.items():
        here, there = mine[kind], theirs[kind]
        if here == there:
            continue
        if here is None or there is None:
            what = f"{'this worker' if here is None else who} was given no gin file, so settings cannot be compared"
            hint = "Give the doctor the same --gin_file and --gin_param on all machines as the run will get."
            findings.append(Finding(WARNING, GROUP, what, why, hint))
            continue
        differing = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        lines = [f"{key}: {there.get(key, 'none')} there, {here.get(key, 'none')} here" for key in differing]
        level = NOTE if kind == "versions" and not set(differing).intersection(MUST_AGREE) else PROBLEM
        what = "\n".join([f"{who} has other {kind}:", *shorten_list(lines, MOST_SHOWN)])
        findings.append(Finding(level, GROUP, what, why, hint, {"differing": differing}))
    if not findings:
        digest = f", configuration {settings_digest(mine['settings'])}" if mine["settings"] is not None else ""
        findings.append(ok_finding(GROUP, f"{who} has the same versions, code {mine['code']['tfdist']}{digest}"))
    return findings
