"""`tfdist env`: what a report of a fault needs to say of a machine, in one block to paste. TensorFlow is not imported.

Invariant: a variable whose name speaks of a secret is named without its value; URLs lose their passwords.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tfdist import __version__, command_line
from tfdist.command_line import flags
from tfdist.doctor.machine import GPUS_OF_DRIVER
from tfdist.doctor.versions import driver_version, list_versions
from tfdist.errors import printable, redact

ABOUT = """\
tfdist env

Prints versions, devices and variables of this machine, to paste into the report of a fault.
"""
FLAGS = flags.FlagValues()
# Of the variables that change what TensorFlow, Keras, Horovod or a cluster do.
BEGINNINGS = ("TF_", "KERAS_", "XLA_", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32", "HOROVOD_", "SLURM_", "OMP_", "TFDIST_")
SECRETS = re.compile("JWT|KEY|TOKEN|SECRET|PASS|CRED|AUTH", re.IGNORECASE)  # in the name of a variable


def run(arguments: Sequence[str]) -> None:
    """Prints the environment as a block to paste into a bug report."""
    command_line.parse(FLAGS, arguments, about=ABOUT)
    print("\n".join(["```", *describe_environment(os.environ), "```"]), flush=True)


def describe_environment(variables: Mapping[str, str]) -> Iterator[str]:
    """Returns a line for each fact of the environment."""
    yield f"tfdist {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {version}" for name, version in list_versions().items())
    memory = psutil.virtual_memory().total / 2**30
    yield f"{len(os.sched_getaffinity(0))} CPUs of {os.cpu_count()}, {memory:.0f} GiB of memory"
    gpus = [_read_model(path) for path in sorted(GPUS_OF_DRIVER.glob("*/information"))]
    yield f"GPUs: {', '.join(gpus) or 'none'}; driver {driver_version() or 'none'}"
    for name in sorted(name for name in variables if name.startswith(BEGINNINGS)):
        yield f"{name}={'…' if SECRETS.search(name) else printable(redact(variables[name]))}"


def _read_model(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "unknown")
