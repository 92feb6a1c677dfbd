"""`--print=tpu_vm`: gcloud commands that get a Cloud TPU VM by a queued resource, train on it and give it back.

Invariant: the script deletes what it created however it ends, and only that; a secret is read on the VM from Google's
Secret Manager and never printed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tfdist.command_line import define_checked, flags
from tfdist.errors import UserError
from tfdist.launch.printing import accelerators, checks
from tfdist.launch.printing.job import define_job, read_job
from tfdist.launch.printing.templates import fill

INSTALL = (
    "sudo add-apt-repository --yes ppa:deadsnakes/ppa && sudo apt-get install --yes python3.11 python3.11-venv && "
    "mkdir -p tfdist && tar -xzf tfdist.tar.gz -C tfdist && cd tfdist && python3.11 -m venv .venv && "
    ".venv/bin/pip install --quiet -e '.[tpu,gcs,examples]'"
)

RESOLVER = "google-api-python-client oauth2client"  # by which TensorFlow finds a TPU by its name
POD_TENSORFLOW = "2.20"
POD_IMAGE = "tpu-vm-tf-2.20.0-pod-pjrt"


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    define_job(values)
    kinds = "such as v5litepod-8, v4-8 or, of several hosts, v4-32"
    define_checked("accelerator", accelerators.tpu_type, kinds, values, required=True)
    define_checked("zone", checks.zone, "such as us-central2-b", values, required=True)
    project = checks.pattern(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "the id of a project of Google Cloud")
    define_checked("project", project, "the configured one without", values)
    runtime = "the plain one for the accelerator without; of several hosts, one whose hosts run TensorFlow"
    define_checked("runtime_version", checks.word, runtime, values)
    define_checked("network", checks.word, "of the machine", values)
    define_checked("service_account", checks.word, "its e-mail address; the machine's without", values)
    flags.DEFINE_bool("spot", False, "cheaper, and taken away when somebody pays more", flag_values=values)
    deadline = "gives the request up when it was not granted by then, such as 6h"
    define_checked("time", checks.duration, deadline, values)
    define_checked("env", checks.variable, "NAME=VALUE, no secrets", values, repeats=True)
    secret = "VARIABLE=SECRET[/VERSION]: a variable that the VM reads from Google's Secret Manager"
    define_checked("secret_env", checks.google_secret, secret, values, repeats=True)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    if options.python == "python":
        options["python"].value = ".venv/bin/python"
    job = read_job(options, arguments)
    if job.num_workers > 1 or job.gpus:
        raise UserError("A TPU slice is one worker: leave --workers and --gpus out with --print=tpu_vm.")
    if not job.is_in_bucket:
        raise UserError(f"--run_dir={job.run_dir} would be lost with the TPU VM. Write --run_dir=gs://BUCKET/…")
    has_several_hosts = accelerators.has_several_hosts(options.accelerator)
    if has_several_hosts and not options.runtime_version:
        raise UserError(
            f"--accelerator={options.accelerator} has several hosts, each of which must run TensorFlow's server. Write "
            f"--runtime_version=IMAGE with an image of TensorFlow {POD_TENSORFLOW} that does, named like {POD_IMAGE}"
        )
    create = [
        f"--accelerator-type={options.accelerator}",
        f"--runtime-version={options.runtime_version or accelerators.SLICES[options.accelerator].runtime_version}",
        *([f"--network={options.network}"] if options.network else []),
        *([f"--service-account={options.service_account}"] if options.service_account else []),
        *(["--spot"] if options.spot else []),
        *([f"--valid-until-duration={options.time}"] if options.time else []),
    ]
    # One process trains, on the first host, and reaches the others by their servers.
    slice_of_servers = [f"TPU_NAME={job.name}", "TPU_LOAD_LIBRARY=0"] if has_several_hosts else []
    run = _run(options, ["env", *slice_of_servers, *job.command] if has_several_hosts else job.command)
    installs = f"{INSTALL} {RESOLVER}" if has_several_hosts else INSTALL
    worker = "0" if has_several_hosts else "all"
    return fill("tpu_vm.sh", options=options, job=job, create=create, install=installs, run=run, worker=worker)


def _run(options: flags.FlagValues, command: Sequence[str]) -> str:
    """What the shell of the VM runs."""
    words = ["cd tfdist"]
    words += [f"export {name}={shlex.quote(value)}" for name, value in options.env]
    for name, secret, version in options.secret_env:
        words.append(f'{name}="$(gcloud secrets versions access {version} --secret={secret})" && export {name}')
    return " && ".join([*words, f"exec {shlex.join(command)}"])
