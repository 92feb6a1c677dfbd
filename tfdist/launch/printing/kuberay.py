"""`--print=kuberay`: a RayJob (ray.io/v1), for which KubeRay makes a Ray cluster, runs the command and removes it.

The cluster wants a token from whoever talks to it: KubeRay (1.5.1 or newer) makes one and keeps it in a secret. The
head computes nothing; each worker's pod has the processors and GPUs of one worker or trial.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.command_line import flags
from tfdist.errors import UserError
from tfdist.launch.printing import accelerators, kubernetes, on_ray
from tfdist.launch.printing.job import read_job
from tfdist.launch.printing.templates import fill, shell

RAY_VERSION = "2.60.0"  # pyproject.toml's extra


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    kubernetes.define_pods(values)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    job = read_job(options, arguments)
    if options.accelerator in accelerators.SLICES:
        raise UserError(
            f"--accelerator={options.accelerator}: TPUs are not for --print=kuberay. Try --print=kubernetes."
        )
    entrypoint = shell(on_ray.driver(options, job), width=1 << 20).strip()
    values = kubernetes.values_of_pods(options, job)
    return fill("rayjob.yaml", **values, entrypoint=entrypoint, ray_version=RAY_VERSION)
