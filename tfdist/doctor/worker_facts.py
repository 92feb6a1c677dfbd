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
MOST_SHOWN = 5
# Differences in these make collectives differ or code behave otherwise; others may be there on one machine only.
MUST_AGREE = ("python", "tensorflow", "keras", "numpy", "horovod")


def collect(*, versions: Mapping[str, str], settings: Mapping[str, str] | None, num_devices: int) -> dict[str, Any]:
    """Collects this worker's facts; `settings` is None where no gin file was given."""
    return {
        "host": socket.gethostname(),
        "versions": dict(versions),
        "code": code_digest(),
        "settings": None if settings is None else dict(settings),
        "num_devices": num_devices,
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
    findings = _compare_versions(mine["versions"], theirs["versions"], name)
    who = f"{name} ({theirs['host']})"
    if mine["code"] != theirs["code"]:
        what = f"{who} has other code of tfdist: {theirs['code']}, here {mine['code']}"
        why = "Workers that run other code wait in other collectives, which hangs or gives wrong sums."
        findings.append(Finding(PROBLEM, GROUP, what, why, "Put one commit, or one image, on all machines."))
    findings += _compare_settings(mine["settings"], theirs["settings"], name)
    if mine["num_devices"] != theirs["num_devices"]:
        what = f"{who} has {theirs['num_devices']} GPUs, this machine {mine['num_devices']}"
        why = "MultiWorkerMirroredStrategy takes all GPUs of each machine and wants the same number of each."
        hint = "Hide the surplus, CUDA_VISIBLE_DEVICES=0,1, or see what `devices` says on the machine with fewer."
        findings.append(Finding(PROBLEM, GROUP, what, why, hint))
    if not findings:
        digest = f", configuration {settings_digest(mine['settings'])}" if mine["settings"] is not None else ""
        findings.append(ok_finding(GROUP, f"{who} has the same versions, code {mine['code']}{digest}"))
    return findings


def _compare_versions(mine: Mapping[str, str], theirs: Mapping[str, str], name: str) -> list[Finding]:
    differing = [p for p in sorted(mine.keys() | theirs.keys()) if mine.get(p) != theirs.get(p)]
    if not differing:
        return []
    shown = "; ".join(f"{p} {theirs.get(p, 'not installed')}, here {mine.get(p, 'not installed')}" for p in differing)
    level = PROBLEM if any(p in MUST_AGREE for p in differing) else NOTE
    why = "Each release may order its collectives, name its variables and round in its own way."
    return [Finding(level, GROUP, f"{name} has other versions: {shown}", why, "Install the same on all machines.")]


def _compare_settings(mine: Mapping[str, str] | None, theirs: Mapping[str, str] | None, name: str) -> list[Finding]:
    if mine is None and theirs is None:
        return []
    if mine is None or theirs is None:
        what = f"{'this worker' if mine is None else name} was given no gin file, so configurations cannot be compared"
        why = "Workers with other settings wait in other collectives."
        hint = "Give the doctor the same --gin_file and --gin_param on all machines as the run will get."
        return [Finding(WARNING, GROUP, what, why, hint)]
    differing = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    if not differing:
        return []
    lines = [f"{key}: {theirs.get(key, 'not set')} there, {mine.get(key, 'not set')} here" for key in differing]
    head = f"{name} has another configuration, {settings_digest(theirs)}, here {settings_digest(mine)}:"
    what = "\n".join([head, *shorten_list(lines, MOST_SHOWN)])
    why = "Workers with other settings train another model or wait in other collectives."
    hint = "Give all workers the same gin files and --gin_param."
    return [Finding(PROBLEM, GROUP, what, why, hint, {"differing": differing})]
