"""`--print=vertex`: a CustomJob of Vertex AI, or with `--search` a HyperparameterTuningJob, as gcloud takes them.

Vertex AI gives each worker its TF_CONFIG, and judges exit statuses by rules of its own. So `tfdist.launch` supervises
the worker in each container, and starts it again where that can help.

Invariant: a trial's container has the same arguments as a training's; `vertex_trial` alone knows about trials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfdist.command_line import define_checked, flags
from tfdist.errors import UserError
from tfdist.launch import vertex_trial
from tfdist.launch.printing import checks
from tfdist.launch.printing.job import Job, define_job, read_job, refuse, values_of, without
from tfdist.launch.printing.templates import fill


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A setting and the values that it may have: a range of two, or the values themselves, ascending."""

    name: str
    values: tuple[float, ...]
    is_range: bool
    is_whole: bool
    is_log: bool


def parameter(text: str) -> Parameter:
    """SETTING=LOW:HIGH, SETTING=LOW:HIGH:log or SETTING=VALUE,VALUE,…"""
    name, _, given = text.partition("=")
    is_range = ":" in given
    numbers = given.removesuffix(":log").split(":" if is_range else ",")
    try:
        values = tuple(map(float, numbers))
    except ValueError:
        values = ()
    is_ascending = all(map(math.isfinite, values)) and list(values) == sorted(set(values))
    is_log = given.endswith(":log")
    if (
        "." not in name
        or not is_ascending
        or len(values) < 2
        or (is_range and len(values) > 2)
        or (is_log and values[0] <= 0)
    ):
        raise ValueError(
            "must be SETTING=LOW:HIGH, SETTING=LOW:HIGH:log with LOW above 0, or SETTING=VALUE,VALUE,… in ascending "
            f"order, such as keras.optimizers.Adam.learning_rate=1e-4:1e-1:log; received {text!r}"
        )
    return Parameter(name, values, is_range, all(each.strip("-").isdigit() for each in numbers), is_log)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    define_job(values)
    define_checked("image", checks.image, "with tag or digest; Dockerfile makes one", values, required=True)
    define_checked("machine_type", checks.word, "such as n1-standard-8", values, required=True)
    gpu = checks.pattern(r"[A-Z][A-Z0-9_]+", "as Vertex AI names it, such as NVIDIA_L4")
    define_checked("accelerator", gpu, "with --gpus: NVIDIA_L4, …", values)
    flags.DEFINE_bool("spot", False, "on machines that may be taken away", flag_values=values)
    define_checked("time", checks.duration, "limit of the whole job, such as 6h; Vertex AI's own without", values)
    define_checked("service_account", checks.word, "its e-mail address", values)
    define_checked("network", checks.word, "projects/NUMBER/global/networks/NAME", values)
    define_checked("env", checks.variable, "NAME=VALUE, no secrets", values, repeats=True)
    search = "SETTING=LOW:HIGH[:log] or SETTING=VALUE,VALUE,…: prints a search of such values"
    define_checked("search", parameter, search, values, repeats=True)
    flags.DEFINE_string("maximize", None, "the metric of the search", flag_values=values)
    flags.DEFINE_string("minimize", None, "the metric of the search", flag_values=values)
    flags.DEFINE_integer("trials", 20, "of the search", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("parallel_trials", 2, "at a time", lower_bound=1, flag_values=values)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    job = read_job(options, arguments)
    _check(options, job)
    seconds = checks.seconds(options.time) if options.time else None
    return fill("vertex.yaml", options=options, job=job, command=_command(options, job), seconds=seconds)


def _check(options: flags.FlagValues, job: Job) -> None:
    if not job.is_in_bucket:
        raise UserError(f"--run_dir={job.run_dir} would be lost with the container. Write --run_dir=gs://BUCKET/…")
    refuse(options, "cpus", "save_seconds", why="Vertex AI decides that by --machine_type and --spot")
    if bool(options.accelerator) != bool(job.gpus):
        raise UserError(
            "--accelerator=NVIDIA_L4 and --gpus=N belong together: which GPU, and how many each worker has."
        )
    if values_of("--mode", job.arguments):
        raise UserError("--print=vertex trains: leave --mode out.")
    if not options.search:
        refuse(options, "maximize", "minimize", "trials", "parallel_trials", why="Nothing is searched without --search")
        return
    refuse(options, "workers", "doctor", why="A trial of a search is one machine that trains")
    if bool(options.maximize) == bool(options.minimize):
        raise UserError("What is the search for? Write one of --maximize=METRIC and --minimize=METRIC.")


def _command(options: flags.FlagValues, job: Job) -> list[str]:
    launch = [f"--max_restarts={job.restarts}", f"--module={job.module}"]
    if not options.search:
        workers = "--launcher=host" if job.num_workers > 1 else "--workers=1"
        return [job.python, "-m", "tfdist.launch", workers, *launch, "--", *job.arguments]
    trial = [job.python, "-m", vertex_trial.__name__, f"--metric={options.maximize or options.minimize}"]
    trial += [f"--{'whole' if each.is_whole else 'real'}={each.name}" for each in options.search]
    arguments = [*without("--run_dir", job.arguments), f"--run_dir={job.run_dir}"]
    return [*trial, f"--max_restarts={job.restarts}", "--", *arguments]
