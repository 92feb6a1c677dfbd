"""`--print=kfp`: a pipeline of Kubeflow Pipelines 2 as a Python file, which compiles itself and can be run in place.

KFP repeats whatever fails and knows no exit statuses. So the step that trains fails with what may pass alone; a status
that is final is its output, with which the next step fails, once.

Invariant: every step runs in the one image, and its components need nothing but it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.command_line import define_checked, flags
from tfdist.errors import UserError
from tfdist.launch.printing import checks
from tfdist.launch.printing.job import define_job, read_job
from tfdist.launch.printing.pipelines.pipeline import define_steps, values_of_steps
from tfdist.launch.printing.templates import fill


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    define_job(values, memory=checks.kubernetes_memory)
    define_checked("image", checks.image, "with tag or digest; Dockerfile makes one", values, required=True)
    define_steps(values)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    job = read_job(options, arguments)
    if not job.is_in_bucket:
        raise UserError(
            f"--run_dir={job.run_dir} would be lost with the first step's pod. Write --run_dir=gs://BUCKET/…"
        )
    return fill("kfp.py", **values_of_steps(options, job))
