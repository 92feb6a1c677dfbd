"""Which versions work together, by what the installed packages say that they need. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tfdist.doctor.findings import NOTE, PROBLEM, WARNING, Finding, fine
from tfdist.requirements import (
    TENSORFLOW_EXTRAS,
    TENSORFLOW_PACKAGES,
    TENSORFLOW_RELEASES,
    installed,
    installed_tensorflow,
)

GROUP = "versions"
PACKAGE = "tfdist"
HOROVOD = "==0.28.1"  # which tools/build_horovod.py builds; no package needs it
# Packages that the workers compare, beside those that tfdist always needs.
COMPARED = (
    "horovod",
    "google-cloud-storage",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu12",
    "libtpu",
)
FOR_DEVELOPERS = ("dev", "docs")  # extras
CUDA_DRIVER = "525.60.13"  # the oldest that runs CUDA 12, by its release notes' table of minor version compatibility
WHY_PINNED = "tfdist uses private parts of this package and is pinned to what it was tested with."
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;.*extra == [\"']([^\"']+)[\"'].*)?")

Installed = Callable[[str], str | None]


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """The version of NVIDIA's kernel module; None where there is none."""
    try:
        found = re.search(r"Kernel Module\D*([0-9]+(?:\.[0-9]+)+)", file.read_text())
    except OSError:
        return None
    return found[1] if found else None


def requirements(package: str = PACKAGE) -> list[tuple[str, str, str | None]]:
    """Returns (package, versions, extra or None) for each requirement of a package; none where it is not installed."""
    try:
        texts = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [match.groups() for match in map(_REQUIREMENT.fullmatch, texts) if match]
    return [(name, wanted, extra) for name, wanted, extra in found if name != package and extra not in FOR_DEVELOPERS]


def all_versions(version_of: Installed = installed) -> dict[str, str]:
    """What is here, for comparing with the other workers."""
    needed = [name for name, _, extra in requirements() if extra is None]
    found = {package: version_of(package) for package in [*needed, *COMPARED]}
    here = {package: version for package, version in found.items() if version is not None}
    tensorflow = next(iter(installed_tensorflow(version_of).values()), None)
    return {"python": platform.python_version()} | ({"tensorflow": tensorflow} if tensorflow else {}) | here


def check_versions(
    needs: Iterable[str] = (), *, version_of: Installed = installed, driver: str | None = None
) -> list[Finding]:
    """Findings about what is installed.

    Args:
      needs: packages beside those that tfdist always needs, which this run cannot do without.
      version_of: gives the version of a package; None where it is not installed.
      driver: the version of NVIDIA's driver, None where there is none.
    """
    findings = [*_python(), *_tensorflow(version_of)]
    for package, wanted, is_needed in _wanted(version_of):
        version = version_of(package)
        if version is None and (is_needed or package in needs):
            findings.append(_missing(package, wanted))
        elif version is not None and not _fits(version, wanted):
            findings.append(_other(package, version, wanted))
    if driver is not None and not _fits(driver, f">={CUDA_DRIVER}"):
        findings.append(
            Finding(
                PROBLEM,
                GROUP,
                f"NVIDIA's driver is {driver}",
                f"TensorFlow is built for CUDA 12.5, which runs on drivers from {CUDA_DRIVER}.",
                "Install a newer driver on this machine.",
            )
        )
    shown = ", ".join(f"{name} {version}" for name, version in all_versions(version_of).items())
    return [*findings, fine(GROUP, shown + (f", NVIDIA driver {driver}" if driver else ""))]


def _wanted(version_of: Installed) -> Iterator[tuple[str, str, bool]]:
    """Yields (package, versions, whether nothing works without it) once for each package and set of versions."""
    found: dict[tuple[str, str], bool] = {("horovod", HOROVOD): False}
    for package, wanted, extra in requirements():
        if package not in TENSORFLOW_PACKAGES:
            found[package, wanted] = found.get((package, wanted), False) or extra is None
    for tensorflow in installed_tensorflow(version_of):  # with which CUDA's libraries it was built
        found |= {(name, wanted): False for name, wanted, _ in requirements(tensorflow) if name.startswith("nvidia-")}
    for (package, wanted), is_needed in found.items():
        yield package, wanted, is_needed


def _python() -> list[Finding]:
    try:
        wanted = importlib.metadata.metadata(PACKAGE)["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        why = "What tfdist needs stands in its package's metadata."
        hint = "Run: pip install --editable . in the checkout."
        return [Finding(NOTE, GROUP, "tfdist is not installed as a package: versions are not compared", why, hint)]
    if _fits(platform.python_version(), wanted):
        return []
    return [
        Finding(
            PROBLEM,
            GROUP,
            f"Python is {platform.python_version()} ({sys.executable})",
            f"tfdist and what it stands on are for Python {wanted}.",
            "Use the Python of the environment that tools/quickstart.sh makes.",
        )
    ]


def _tensorflow(version_of: Installed) -> list[Finding]:
    found = installed_tensorflow(version_of)
    releases, hint = " or ".join(TENSORFLOW_RELEASES), f"Run: pip install {TENSORFLOW_EXTRAS}"
    if not found:
        why = f"tfdist needs TensorFlow {releases}, which comes by an extra."
        return [Finding(PROBLEM, GROUP, "TensorFlow is not installed", why, hint)]
    findings = [
        Finding(PROBLEM, GROUP, f"{package} is {version}, not {releases}", WHY_PINNED, hint)
        for package, version in found.items()
        if ".".join(version.split(".")[:2]) not in TENSORFLOW_RELEASES
    ]
    if len(found) > 1:
        why = "They are packages of one module: which of them is imported is left to chance."
        hint = f"Run: pip uninstall {' '.join(found)}, and install the one that is meant."
        findings.append(Finding(WARNING, GROUP, f"{' and '.join(found)} are both installed", why, hint))
    return findings


def _missing(package: str, wanted: str) -> Finding:
    hint = "Run: python tools/build_horovod.py" if package == "horovod" else f"Run: pip install '{package}{wanted}'"
    return Finding(PROBLEM, GROUP, f"{package} is not installed", f"This run needs {package}{wanted}.", hint)


def _other(package: str, version: str, wanted: str) -> Finding:
    level = PROBLEM if package in ("keras", "gin-config") else WARNING
    why = WHY_PINNED if level == PROBLEM else "TensorFlow and tfdist were not tried with it."
    hint = "Run: python tools/build_horovod.py" if package == "horovod" else f"Run: pip install '{package}{wanted}'"
    return Finding(level, GROUP, f"{package} is {version}, not {wanted}", why, hint)


def _fits(version: str, wanted: str) -> bool:
    """Whether a version is one of those wanted; True where it cannot be told because `packaging` is missing."""
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version
    except ImportError:
        return True
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
