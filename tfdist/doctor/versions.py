"""Which versions work together, and which are installed here. Imports none of them."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tfdist.doctor.findings import PROBLEM, WARNING, Finding, fine
from tfdist.requirements import TENSORFLOW_EXTRAS, installed, installed_tensorflow

GROUP = "versions"
PYTHON = ">=3.11,<3.14"
TENSORFLOW = ">=2.20,<2.22"
# What tfdist was built for and is tested with, as pyproject.toml has it. TensorFlow comes by one of its extras.
NEEDED = {
    "keras": ">=3.15,<3.16",
    "gin-config": "==0.5.0",
    "numpy": ">=2.0,<2.5",
    "absl-py": ">=2.1,<3",
    "google-crc32c": ">=1.7,<2",
    "jinja2": ">=3.1,<4",
    "psutil": ">=5.9,<8",
    "rich": ">=14,<16",
    "tensorboard": ">=2.20,<2.22",
    "packaging": ">=24",
}
LIBTPU = ">=0.0.17,<=0.0.24"  # with a newer one, 0.0.52, tensorflow-tpu 2.20 ends at its import
# What goes with them where it is there. CUDA's libraries are those that TensorFlow 2.20 and 2.21 were built with: CUDA
# 12.5.1, cuDNN 9, and for the extra and-cuda of 2.21 NCCL from 2.27.7.
BESIDE = {
    "horovod": "==0.28.1",
    "google-cloud-storage": ">=3.4,<4",
    "nvidia-cuda-runtime-cu12": ">=12.5.82,<13",
    "nvidia-cudnn-cu12": ">=9.3.0.75,<10",
    "nvidia-nccl-cu12": ">=2.27.7,<3",
    "libtpu": LIBTPU,
}
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


def all_versions(version_of: Installed = installed) -> dict[str, str]:
    """What is here, for comparing with the other workers."""
    found = {package: version_of(package) for package in [*NEEDED, *BESIDE]}
    here = {package: version for package, version in found.items() if version is not None}
    tensorflow = next(iter(installed_tensorflow(version_of).values()), None)
    return {"python": platform.python_version()} | ({"tensorflow": tensorflow} if tensorflow else {}) | here


def check_versions(
    needs: Iterable[str] = (), *, version_of: Installed = installed, driver: str | None = None
) -> list[Finding]:
    """Findings about what is installed.

    Args:
      needs: packages of `BESIDE` that this run cannot do without.
      driver: the version of NVIDIA's driver, None where there is none.
    """
    findings = [*_python(), *_tensorflow(version_of)]
    for package, wanted in {**NEEDED, **BESIDE}.items():
        version = version_of(package)
        if version is None and (package in NEEDED or package in needs):
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


def _python() -> list[Finding]:
    if _fits(platform.python_version(), PYTHON):
        return []
    return [
        Finding(
            PROBLEM,
            GROUP,
            f"Python is {platform.python_version()} ({sys.executable})",
            f"tfdist and what it stands on are for Python {PYTHON}.",
            "Use the Python of the environment that tools/quickstart.sh makes.",
        )
    ]


def _tensorflow(version_of: Installed) -> list[Finding]:
    found = installed_tensorflow(version_of)
    hint = f"Run: pip install {TENSORFLOW_EXTRAS}"
    if not found:
        why = f"tfdist needs TensorFlow {TENSORFLOW}, which comes by an extra."
        return [Finding(PROBLEM, GROUP, "TensorFlow is not installed", why, hint)]
    findings = [
        Finding(PROBLEM, GROUP, f"{package} is {version}, not {TENSORFLOW}", WHY_PINNED, hint)
        for package, version in found.items()
        if not _fits(version, TENSORFLOW)
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
