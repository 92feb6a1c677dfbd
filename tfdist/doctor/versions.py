"""Which versions work together, by what the installed packages say that they need. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tfdist.doctor.findings import NOTE, PROBLEM, WARNING, Finding, ok_finding
from tfdist.requirements import (
    TENSORFLOW_EXTRAS,
    TENSORFLOW_PACKAGES,
    TENSORFLOW_RELEASES,
    find_version,
    installed_tensorflow,
)

GROUP = "versions"
PACKAGE = "tfdist"
HOROVOD = Requirement("horovod==0.28.1")  # which tfdist.build_horovod builds; no package needs it
# Packages that the workers compare, beside those that tfdist always needs.
COMPARED = (
    *("horovod", "google-cloud-storage", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"),
    "libtpu",
)
FOR_DEVELOPERS = {"dev", "docs"}  # extras
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


def requirements(package: str = PACKAGE) -> Iterator[tuple[Requirement, bool]]:
    """Yields what a package needs, always or with an extra for users, and whether always; nothing if not installed."""
    try:
        about = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return
    extras = set(about.get_all("Provides-Extra") or ()) - FOR_DEVELOPERS
    for requirement in map(Requirement, about.get_all("Requires-Dist") or ()):
        marker = requirement.marker
        is_users = marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})
        if is_users and requirement.name != package:
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
    wanted = [(HOROVOD, False), *requirements()]
    for tensorflow in installed_tensorflow(version_of):  # with which CUDA's libraries it was built
        wanted += [(each, False) for each, _ in requirements(tensorflow) if each.name.startswith("nvidia-")]
    if not any(requirements()):
        why, hint = "What tfdist needs stands in its package's metadata.", "Run: pip install --editable . there."
        findings.append(Finding(NOTE, GROUP, "tfdist is not installed as a package, as by a checkout", why, hint))
    needed = {requirement.name for requirement, is_needed in wanted if is_needed} | set(needs)
    specified = {(each.name, str(each.specifier)): each for each, _ in wanted if each.name not in TENSORFLOW_PACKAGES}
    for (package, versions), requirement in specified.items():
        version = version_of(package)
        hint = f"Run: pip install '{package}{versions}'"
        if package == "horovod":
            hint = "Run: python -m tfdist.build_horovod"
        if version is None and package in needed:
            why = f"This run needs {package}{versions}."
            findings.append(Finding(PROBLEM, GROUP, f"{package} is not installed", why, hint))
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            is_pinned = package in ("keras", "gin-config")
            why = WHY_PINNED if is_pinned else "TensorFlow and tfdist were not tried with it."
            level, what = PROBLEM if is_pinned else WARNING, f"{package} is {version}, not {versions}"
            findings.append(Finding(level, GROUP, what, why, hint))
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
