"""What must be installed for anything to work, and what to install where it is not.

Invariant: importing this module, and asking it, imports none of those packages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from tfdist.errors import UserError, build_user_error

# The modules without which nothing works, and the packages that hold them: pyproject.toml's, and TensorFlow.
REQUIREMENTS = {
    "absl": "absl-py",
    "gin": "gin-config",
    "google_crc32c": "google-crc32c",
    "jinja2": "jinja2",
    "keras": "keras",
    "numpy": "numpy",
    "packaging": "packaging",
    "psutil": "psutil",
    "rich": "rich",
    "tensorboard": "tensorboard",
    "tensorflow": "tensorflow",
}
# TensorFlow comes in several packages, each with the module `tensorflow`; an extra names the one for a machine.
TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")
TENSORFLOW_RELEASES = ("2.20", "2.21")
TENSORFLOW_EXTRAS = "'tfdist[cpu]', with NVIDIA GPUs 'tfdist[gpu]', on a Cloud TPU VM 'tfdist[tpu]'"


def missing_requirement(module: str) -> UserError | None:
    """The error for a module that is not installed; None where it is none of those that tfdist stands on."""
    name = module.split(".")[0]
    package = REQUIREMENTS.get(name)
    if package is None:
        return None
    return build_user_error(
        f"{sys.executable} has no module {name!r}, which tfdist needs. Use the Python of the environment "
        f"in which tfdist is installed, or run: pip install "
        f"{TENSORFLOW_EXTRAS if package == 'tensorflow' else package}",
        error_id="missing-package",
    )


def find_version(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    import importlib.metadata  # it takes longer than an answer to --help may

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_tensorflow(version_of: Callable[[str], str | None] = find_version) -> dict[str, str]:
    """The version of each package that has the module `tensorflow`; none where it came in another way."""
    found = {package: version_of(package) for package in TENSORFLOW_PACKAGES}
    return {package: version for package, version in found.items() if version is not None}


def check_tensorflow() -> None:
    """Raises UserError where TensorFlow is of a release that tfdist was not built for."""
    for package, version in installed_tensorflow().items():
        release = re.match(r"\d+\.\d+", version)
        if release is None or release[0] not in TENSORFLOW_RELEASES:
            raise build_user_error(
                f"{package} is {version}; tfdist needs TensorFlow {' or '.join(TENSORFLOW_RELEASES)}. "
                f"Run: pip install {TENSORFLOW_EXTRAS}",
                error_id="missing-package",
            )
