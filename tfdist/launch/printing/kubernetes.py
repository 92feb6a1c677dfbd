"""`--print=kubernetes`: a JobSet whose pods are the workers of MultiWorkerMirroredStrategy, or an MPIJob for Horovod.

A JobSet brings a headless service under which pod i is NAME-worker-0-i.NAME, so TF_CONFIG can be written down before
anything runs. How a pod ended decides what follows (`podFailurePolicy`, first match): 2 and 3 fail the JobSet, as
again would be the same; 143, and a pod that Kubernetes itself took away, do not count and get a new pod in the same
place; anything else fails the job, which the JobSet starts anew up to `restarts` times.

Invariant: a secret appears by its name and key, never by value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tfdist.command_line import define_checked, flags
from tfdist.errors import UserError
from tfdist.launch.printing import accelerators, checks
from tfdist.launch.printing.job import Job, define_job, read_job
from tfdist.launch.printing.templates import fill


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this scheduler."""
    define_pods(values)
    launchers = ["tf_config", "horovod"]
    flags.DEFINE_enum("launcher", "tf_config", launchers, "a JobSet, or an MPIJob", flag_values=values)
    flags.DEFINE_integer("port", 2222, "of every worker", lower_bound=1024, upper_bound=65535, flag_values=values)


def define_pods(values: flags.FlagValues) -> None:
    """Defines the flags of a job whose workers are pods."""
    define_job(values, memory=checks.kubernetes_memory)
    define_checked("image", checks.image, "with tag or digest; Dockerfile makes one", values, required=True)
    define_checked("namespace", checks.name, "where the job is made", values)
    names = "as GKE names it: nvidia-l4, …, or a TPU: v5litepod-8, …"
    define_checked("accelerator", accelerators.gpu_or_tpu, names, values)
    flags.DEFINE_bool("spot", False, "on GKE's spot machines", flag_values=values)
    define_checked("time", checks.duration, "limit of the whole run, such as 6h", values)
    define_checked("shared_memory", checks.kubernetes_memory, "size of /dev/shm", values, default="2Gi")
    account = "Kubernetes' own, such as one bound to a Google account"
    define_checked("service_account", checks.name, account, values)
    define_checked("volume", checks.volume, "CLAIM:/PATH", values, repeats=True)
    define_checked("env", checks.variable, "NAME=VALUE, no secrets", values, repeats=True)
    secret = "VARIABLE=SECRET/KEY: a variable "
    define_checked("secret_env", checks.kubernetes_secret, f"{secret}from a secret", values, repeats=True)
    define_checked("secret_file", checks.kubernetes_secret, f"{secret}with the path of a file", values, repeats=True)


def render(options: flags.FlagValues, arguments: Sequence[str]) -> str:
    """The text to print, for these flags and the arguments of tfdist.main."""
    job = read_job(options, arguments)
    values = values_of_pods(options, job)
    if options.accelerator in accelerators.SLICES and (
        job.num_workers > 1 or job.gpus or options.launcher == "horovod"
    ):
        raise UserError(
            "A TPU slice is one worker: leave --workers, --gpus and --launcher out with "
            f"--accelerator={options.accelerator}."
        )
    if options.launcher == "horovod":
        return fill("mpijob.yaml", **values, processes=max(1, job.gpus), mpirun=_mpirun(options, job))
    return fill("jobset.yaml", **values, place=_tf_config(options, job))


def values_of_pods(options: flags.FlagValues, job: Job) -> dict[str, Any]:
    """What the templates are told; raises UserError where the options do not fit together."""
    _check(options, job)
    return {
        "options": options,
        "job": job,
        "seconds": checks.seconds(options.time) if options.time else None,
        "resources": _resources(options, job),
        "selector": _node_selector(options),
        "tolerations": _tolerations(options, job),
    }


def _check(options: flags.FlagValues, job: Job) -> None:
    if not job.is_in_bucket and not any(_is_below(job.run_dir, path) for _, path in options.volume):
        raise UserError(
            f"--run_dir={job.run_dir} lies inside of the container and would be lost with it. Write --run_dir=gs://…, "
            "or mount a volume that all workers can write, --volume=CLAIM:/runs, and write --run_dir=/runs/…"
        )
    if options.accelerator in accelerators.SLICES:
        slice_ = accelerators.SLICES[options.accelerator]
        if slice_.node_label is None:
            raise UserError(f"--accelerator={options.accelerator}: GKE has no such nodes. Try --print=tpu_vm.")
    elif options.accelerator and not job.gpus:
        raise UserError(f"--accelerator={options.accelerator} needs --gpus=N: how many for each worker?")


def _is_below(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory}/")


def _mpirun(options: flags.FlagValues, job: Job) -> list[str]:
    """What the launcher of an MPIJob (kubeflow.org/v2beta1) runs.

    Its operator knows no rules for exit statuses: every end of mpirun but 0 counts as a restart.
    """
    words = ["mpirun", "--allow-run-as-root", "-np", str(job.num_workers * max(1, job.gpus))]
    words += ["--bind-to", "none", "--map-by", "slot", "--mca", "pml", "ob1", "--mca", "btl", "^openib"]
    words += ["--mca", "odls_base_sigkill_timeout", str(job.save_seconds)]
    named = [name for name, *_ in [*options.env, *options.secret_env, *options.secret_file]]
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONUNBUFFERED", *named):
        words += ["-x", name]
    return [*words, *job.command]


def _tf_config(options: flags.FlagValues, job: Job) -> str | None:
    """What Kubernetes makes each pod's TF_CONFIG of; None for a worker that is alone."""
    if job.num_workers == 1:
        return None
    addresses = [f"{job.name}-worker-0-{i}.{job.name}:{options.port}" for i in range(job.num_workers)]
    cluster = json.dumps({"worker": addresses})
    return f'{{"cluster": {cluster}, "task": {{"type": "worker", "index": $(TASK_INDEX)}}}}'


def _resources(options: flags.FlagValues, job: Job) -> dict[str, str]:
    slice_ = accelerators.SLICES.get(options.accelerator)
    amounts = {
        "cpu": job.cpus,
        "memory": job.memory,
        "nvidia.com/gpu": job.gpus,
        "google.com/tpu": None if slice_ is None else slice_.chips,
    }
    return {kind: str(amount) for kind, amount in amounts.items() if amount}


def _node_selector(options: flags.FlagValues) -> dict[str, str]:
    selector = {"cloud.google.com/gke-spot": "true"} if options.spot else {}
    if options.accelerator in accelerators.SLICES:
        slice_ = accelerators.SLICES[options.accelerator]
        assert slice_.node_label is not None
        selector["cloud.google.com/gke-tpu-accelerator"] = slice_.node_label
        selector["cloud.google.com/gke-tpu-topology"] = slice_.topology
    elif options.accelerator:
        selector["cloud.google.com/gke-accelerator"] = options.accelerator
    return selector


def _tolerations(options: flags.FlagValues, job: Job) -> list[str]:
    """The taints that GKE puts on machines with GPUs and TPUs and on spot machines."""
    return [
        *(["nvidia.com/gpu"] if job.gpus else []),
        *(["google.com/tpu"] if options.accelerator in accelerators.SLICES else []),
        *(["cloud.google.com/gke-spot"] if options.spot else []),
    ]
