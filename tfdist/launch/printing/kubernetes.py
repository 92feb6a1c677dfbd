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
from tfdist.errors import EXIT_DIVERGED, EXIT_PREEMPTED, EXIT_USER_ERROR, UserError, missing_requirement
from tfdist.launch.printing import accelerators, checks
from tfdist.launch.printing.job import Job, define_job, read_job

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
WORKER = "worker"
GROUP = 1000  # of Dockerfile's user, who is to write what is mounted
LAUNCHER_RESOURCES = {"cpu": "1", "memory": "2Gi"}


def define_flags(values: flags.FlagValues) -> None:
    define_job(values, memory=checks.kubernetes_memory)
    define_checked("image", checks.image, "with tag or digest; Dockerfile makes one", values, required=True)
    launchers = ["tf_config", "horovod"]
    flags.DEFINE_enum("launcher", "tf_config", launchers, "a JobSet, or an MPIJob", flag_values=values)
    define_checked("namespace", checks.name, "where the job is made", values)
    names = "as GKE names it: nvidia-l4, …, or a TPU: v5litepod-8, …"
    define_checked("accelerator", accelerators.gpu_or_tpu, names, values)
    flags.DEFINE_bool("spot", False, "on GKE's spot machines", flag_values=values)
    flags.DEFINE_integer("port", 2222, "of every worker", lower_bound=1024, upper_bound=65535, flag_values=values)
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
    job = read_job(options, arguments)
    _check(options, job)
    make = mpi_job if options.launcher == "horovod" else job_set
    head = (
        f"# kubectl apply -f FILE; {job.num_workers} worker{'s' * (job.num_workers > 1)}, run directory {job.run_dir}"
    )
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise missing_requirement("yaml") or error from error
    return f"{head}\n" + yaml.safe_dump(make(options, job), sort_keys=False, width=110, allow_unicode=True)


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
        if job.num_workers > 1 or job.gpus or options.launcher == "horovod":
            raise UserError(
                "A TPU slice is one worker: leave --workers, --gpus and --launcher out with "
                f"--accelerator={options.accelerator}."
            )
    elif options.accelerator and not job.gpus:
        raise UserError(f"--accelerator={options.accelerator} needs --gpus=N: how many for each worker?")


def _is_below(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory}/")


def job_set(options: flags.FlagValues, job: Job) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) of one indexed Job with a pod for each worker."""
    rules = [
        _on_statuses("FailJob", EXIT_USER_ERROR, EXIT_DIVERGED),
        _on_statuses("Ignore", EXIT_PREEMPTED),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    pod = _pod(options, job, _tf_config(options, job), job.command) | {"restartPolicy": "Never"}
    work = {
        "parallelism": job.num_workers,
        "completions": job.num_workers,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        **({"activeDeadlineSeconds": _seconds(options.time)} if options.time else {}),
        "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod},
    }
    failed_for_good = {"name": "again_would_be_the_same", "action": "FailJobSet"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(options, job),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
            "failurePolicy": {
                "maxRestarts": job.restarts,
                "rules": [failed_for_good | {"onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": WORKER, "replicas": 1, "template": {"spec": work}}],
        },
    }


def _on_statuses(action: str, *statuses: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": WORKER, "operator": "In", "values": sorted(statuses)}}


def mpi_job(options: flags.FlagValues, job: Job) -> dict[str, Any]:
    """An MPIJob (kubeflow.org/v2beta1): a launcher that runs mpirun, and workers that run sshd.

    Its operator knows no rules for exit statuses: every end of mpirun but 0 counts as a restart.
    """
    processes = max(1, job.gpus)
    mpirun = ["mpirun", "--allow-run-as-root", "-np", str(job.num_workers * processes)]
    mpirun += ["--bind-to", "none", "--map-by", "slot", "--mca", "pml", "ob1", "--mca", "btl", "^openib"]
    mpirun += ["--mca", "odls_base_sigkill_timeout", str(job.save_seconds)]
    named = [name for name, _ in options.env] + [name for name, *_ in [*options.secret_env, *options.secret_file]]
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONUNBUFFERED", *named):
        mpirun += ["-x", name]
    launcher = _pod(options, job, [], [*mpirun, *job.command], resources=LAUNCHER_RESOURCES, name="launcher")
    worker = _pod(options, job, [], None)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": _metadata(options, job),
        "spec": {
            "slotsPerWorker": processes,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "mpiImplementation": "OpenMPI",
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": job.restarts,
                **({"activeDeadlineSeconds": _seconds(options.time)} if options.time else {}),
            },
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": launcher}},
                "Worker": {"replicas": job.num_workers, "restartPolicy": "Never", "template": {"spec": worker}},
            },
        },
    }


def _metadata(options: flags.FlagValues, job: Job) -> dict[str, Any]:
    return {"name": job.name, **({"namespace": options.namespace} if options.namespace else {})}


def _pod(
    options: flags.FlagValues,
    job: Job,
    variables: Sequence[dict[str, Any]],
    command: Sequence[str] | None,
    *,
    resources: dict[str, str] | None = None,
    name: str = WORKER,
) -> dict[str, Any]:
    """The specification of a pod; `resources` replaces the worker's, for a pod that needs no accelerator."""
    is_worker = resources is None
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}]
    for number, (claim, path) in enumerate(options.volume):
        mounts.append({"name": f"volume-{number}", "mountPath": path})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    for number, (_, secret, key) in enumerate(options.secret_file):
        mounts.append({"name": f"secret-{number}", "mountPath": _secret_directory(number), "readOnly": True})
        source = {"secretName": secret, "items": [{"key": key, "path": key}], "defaultMode": 0o444}
        volumes.append({"name": f"secret-{number}", "secret": source})
    container = {
        "name": name,
        "image": options.image,
        **({"command": list(command)} if command else {}),
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}, *_variables(options), *variables],
        **({"ports": [{"containerPort": options.port}]} if variables else {}),
        "resources": _resources(options, job)
        if resources is None
        else {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": mounts,
    }
    selector = _node_selector(options) if is_worker else {}
    return {
        "terminationGracePeriodSeconds": job.save_seconds,
        **({"serviceAccountName": options.service_account} if options.service_account else {}),
        **({"nodeSelector": selector} if selector else {}),
        **({"tolerations": _tolerations(options, job)} if _tolerations(options, job) and is_worker else {}),
        **({"securityContext": {"fsGroup": GROUP}} if options.volume else {}),
        "containers": [container],
        "volumes": volumes,
    }


def _tf_config(options: flags.FlagValues, job: Job) -> list[dict[str, Any]]:
    """Variables of which Kubernetes makes each pod's TF_CONFIG; none for a worker that is alone."""
    if job.num_workers == 1:
        return []
    addresses = [f"{job.name}-{WORKER}-0-{i}.{job.name}:{options.port}" for i in range(job.num_workers)]
    cluster = json.dumps({"worker": addresses})
    label = f"metadata.labels['{INDEX_LABEL}']"
    return [
        {"name": "TASK_INDEX", "valueFrom": {"fieldRef": {"fieldPath": label}}},
        {
            "name": "TF_CONFIG",
            "value": f'{{"cluster": {cluster}, "task": {{"type": "worker", "index": $(TASK_INDEX)}}}}',
        },
    ]


def _variables(options: flags.FlagValues) -> list[dict[str, Any]]:
    by_reference = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, secret, key in options.secret_env
    ]
    paths = [
        {"name": name, "value": f"{_secret_directory(number)}/{key}"}
        for number, (name, _, key) in enumerate(options.secret_file)
    ]
    return [{"name": name, "value": value} for name, value in options.env] + by_reference + paths


def _secret_directory(number: int) -> str:
    return f"/var/run/secrets/tfdist/{number}"


def _resources(options: flags.FlagValues, job: Job) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if job.cpus:
        limits["cpu"] = str(job.cpus)
    if job.memory:
        limits["memory"] = job.memory
    if job.gpus:
        limits["nvidia.com/gpu"] = str(job.gpus)
    if options.accelerator in accelerators.SLICES:
        limits["google.com/tpu"] = str(accelerators.SLICES[options.accelerator].chips)
    return {"requests": dict(limits), "limits": limits} if limits else {}


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


def _tolerations(options: flags.FlagValues, job: Job) -> list[dict[str, str]]:
    """For the taints that GKE puts on machines with GPUs and TPUs and on spot machines."""
    keys = [
        *(["nvidia.com/gpu"] if job.gpus else []),
        *(["google.com/tpu"] if options.accelerator in accelerators.SLICES else []),
        *(["cloud.google.com/gke-spot"] if options.spot else []),
    ]
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[-1]]
