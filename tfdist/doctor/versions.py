"""Which versions work together, by what the installed packages say that they need. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tfdist.doctor.findings import PROBLEM, WARNING, Finding, ok_finding
from tfdist.requirements import (
    TENSORFLOW_EXTRAS,
    TENSORFLOW_PACKAGES,
    TENSORFLOW_RELEASES,
    find_version,
    installed_tensorflow,
)

GROUP = "versions"
PACKAGE = "tfdist"
# Packages that the workers compare, beside those that tfdist always needs.
COMPARED = (
    *("horovod", "google-cloud-storage", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"),
    "libtpu",
)
FOR_DEVELOPERS = {"dev", "docs"}  # extras
PINNED = ("keras", "gin-config")
CUDA_DRIVER = "525.60.13"  # the oldest that runs CUDA 12, by its release notes' table of minor version compatibility
WHY_PINNED = "tfdist uses private parts of this package and is pinned to what it was tested with."
DRIVER_FILE = Path("/proc/driver/nvidia/version")

Installed = Callable[[str], str | None]


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """The version of NVIDIA's kernel module; None where there is none."""
    try:
        found = re.search(r"Kernel Module\D*([0-9]+(?:\.[0-9]+)+)", file.read_text())
    except OSError:
        return None
    return found[1] if found else None


def requirements() -> Iterator[tuple[Requirement, bool]]:
    """Yields what tfdist needs, always or with an extra for users, and whether always; nothing if not installed."""
    try:
        about = importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return
    extras = set(about.get_all("Provides-Extra") or ()) - FOR_DEVELOPERS
    for requirement in map(Requirement, about.get_all("Requires-Dist") or ()):
        marker = requirement.marker
        is_users = marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})
        if is_users and requirement.name != PACKAGE:
            yield requirement, marker is None


def list_versions(version_of: Installed = find_version) -> dict[str, str]:
    """Returns the versions of this worker by package, to compare them with the other workers'."""
    needed = [requirement.name for requirement, is_needed in requirements() if is_needed]
    found = {package: version_of(package) for package in [*needed, *COMPARED]}
    tensorflow = next(iter(installed_tensorflow(version_of).values()), None)
    found = {"python": platform.python_version(), "tensorflow": tensorflow, **found}
    return {package: version for package, version in found.items() if version is not None}


def check_versions(
    needs: Iterable[str] = (), *, version_of: Installed = find_version, driver: str | None = None
) -> list[Finding]:
    """Checks that the installed versions work together.

    Args:
      needs: packages beside those that tfdist always needs, which this run cannot do without.
      version_of: gives the version of a package; None where it is not installed.
      driver: the version of NVIDIA's driver, None where there is none.
    """
    findings = _check_tensorflow(version_of)
    wanted = [(each, is_needed) for each, is_needed in requirements() if each.name not in TENSORFLOW_PACKAGES]
    wanted += [(Requirement(package), True) for package in needs]
    for requirement, is_needed in wanted:
        package, version = requirement.name, version_of(requirement.name)
        install = f"pip install '{package}{requirement.specifier}'"
        hint = f"Run: {'python -m tfdist.build_horovod' if package == 'horovod' else install}"
        if version is None and is_needed:
            why = f"This run needs {requirement}."
            findings.append(Finding(PROBLEM, GROUP, f"{package} is not installed", why, hint))
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            level = PROBLEM if package in PINNED else WARNING
            why = WHY_PINNED if package in PINNED else "TensorFlow and tfdist were not tried with it."
            findings.append(Finding(level, GROUP, f"{package} is {version}, not {requirement.specifier}", why, hint))
    if driver is not None and Version(driver) < Version(CUDA_DRIVER):
        why = f"TensorFlow is built for CUDA 12.5, which runs on drivers from {CUDA_DRIVER}."
        hint = "Install a newer driver on this machine."
        findings.append(Finding(PROBLEM, GROUP, f"NVIDIA's driver is {driver}", why, hint))
    shown = ", ".join(f"{name} {version}" for name, version in list_versions(version_of).items())
    return [*findings, ok_finding(GROUP, shown + (f", NVIDIA driver {driver}" if driver else ""))]


def _check_tensorflow(version_of: Installed) -> list[Finding]:
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
