"""What `--print` writes: manifests against published schemas, scripts run with stand-ins for schedulers' commands."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import support
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tfdist.errors import EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_USER_ERROR, UserError
from tfdist.launch import slurm_worker
from tfdist.launch.printing import command
from tfdist.strategies.cluster.tf_config import read_tf_config

KUBERNETES = "1.33"
DIGITS = "--gin_file=configs/experiments/digits.gin"
# What v2beta1 of mpijobs.kubeflow.org (mpi-operator 0.6) has, its pod templates aside, which are core Kubernetes.
COUNT = {"type": "integer", "minimum": 0}
REPLICAS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["template"],
    "properties": {
        "replicas": COUNT,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"type": "object"},
    },
}
MPI_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v2beta1"},
        "kind": {"const": "MPIJob"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["mpiReplicaSpecs"],
            "properties": {
                "slotsPerWorker": COUNT,
                "runLauncherAsWorker": {"type": "boolean"},
                "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
                "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
                "sshAuthMountPath": {"type": "string"},
                "runPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "activeDeadlineSeconds": COUNT,
                        "backoffLimit": COUNT,
                        "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
                        "managedBy": {"type": "string"},
                        "schedulingPolicy": {"type": "object"},
                        "suspend": {"type": "boolean"},
                        "ttlSecondsAfterFinished": COUNT,
                    },
                },
                "mpiReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["Launcher"],
                    "properties": {"Launcher": REPLICAS, "Worker": REPLICAS},
                },
            },
        },
    },
}
POD_TEMPLATE = {"type": "object", "additionalProperties": False, "required": ["spec"]} | {
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}}
}
START_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
# What v1 of rayjobs.ray.io (KubeRay 1.5) has and a run may want, its pod templates aside.
RAY_JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["entrypoint", "rayClusterSpec"],
            "properties": {
                "entrypoint": {"type": "string"},
                "activeDeadlineSeconds": COUNT,
                "backoffLimit": COUNT,
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
                "ttlSecondsAfterFinished": COUNT,
                "rayClusterSpec": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["headGroupSpec"],
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "authOptions": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"mode": {"enum": ["disabled", "token"]}, "secretName": {"type": "string"}},
                        },
                        "headGroupSpec": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["template"],
                            "properties": {"rayStartParams": START_PARAMS, "template": POD_TEMPLATE},
                        },
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["groupName", "template"],
                                "properties": {
                                    "groupName": {"type": "string"},
                                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), COUNT),
                                    "rayStartParams": START_PARAMS,
                                    "template": POD_TEMPLATE,
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def printed(scheduler: str, *options: str, run_dir: str = "gs://bucket/run") -> str:
    return command.printed([f"--print={scheduler}", *options, "--", DIGITS, f"--run_dir={run_dir}"])


def manifest(*options: str, **more: str) -> dict[str, Any]:
    return yaml.safe_load(printed("kubernetes", "--image=registry/tfdist:1", *options, **more))


def closed(schema: Any) -> Any:
    """A schema in which a field that it does not name is an error, as it is to `kubectl apply`."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(each) for name, each in schema.items()}
    return inner if "properties" not in schema else inner | {"additionalProperties": False}


def check_job_set(found: dict[str, Any]) -> None:
    schema = closed(JobsetV1alpha2JobSet.model_json_schema(by_alias=True))
    for kind in (
        "ResourceQuantity",
        "UtilIntstrIntOrString",
    ):  # described by how Python holds them, not as they are sent
        schema["$defs"].update({name: {} for name in schema["$defs"] if name.endswith(kind)})
    jsonschema.validate(found, schema)
    for each in found["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def check_ray_job(found: dict[str, Any]) -> None:
    jsonschema.validate(found, RAY_JOB)
    cluster = found["spec"]["rayClusterSpec"]
    for each in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def check_mpi_job(found: dict[str, Any]) -> None:
    jsonschema.validate(found, MPI_JOB)
    for each in found["spec"]["mpiReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


EVERYTHING = [
    *("--workers=3", "--gpus=2", "--cpus=8", "--memory=32Gi", "--accelerator=nvidia-l4", "--spot", "--namespace=ml"),
    *("--time=6h", "--service_account=trainer", "--volume=scratch:/scratch", "--env=NCCL_DEBUG=WARN"),
    "--secret_env=WANDB_API_KEY=wandb/key",
    "--secret_file=GOOGLE_APPLICATION_CREDENTIALS=gcs/key.json",
]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--workers=2"], EVERYTHING, ["--accelerator=v5litepod-8"]])
def test_a_job_set_fits_the_published_schemas(options: list[str]) -> None:
    check_job_set(manifest(*options))


@pytest.mark.parametrize("options", [["--workers=2"], EVERYTHING])
def test_an_mpi_job_fits_the_published_schemas(options: list[str]) -> None:
    found = manifest("--launcher=horovod", *options)
    check_mpi_job(found)
    launcher = found["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    processes = found["spec"]["slotsPerWorker"] * found["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert launcher["command"][launcher["command"].index("-np") + 1] == str(processes)


@pytest.mark.parametrize("options", [[], ["--workers=2"], EVERYTHING])
def test_a_ray_job_fits_its_schema_and_wants_a_token(options: list[str]) -> None:
    found = yaml.safe_load(printed("kuberay", "--image=registry/tfdist:1", *options))
    check_ray_job(found)
    cluster = found["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == importlib.metadata.version("ray")
    (workers,) = cluster["workerGroupSpecs"]
    assert f"--workers={workers['replicas']} " in found["spec"]["entrypoint"]


def test_a_sweep_on_ray_is_led_by_one_process() -> None:
    options = ["--print=kuberay", "--image=registry/tfdist:1", "--workers=3", "--gpus=1", "--"]
    text = command.printed([*options, DIGITS, "--run_dir=gs://bucket/run", "--mode=tune"])
    words = shlex.split(yaml.safe_load(text)["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "tfdist.main"]
    assert words[-2:] == [
        "--gin_param=tune.executor = @executor.Ray(cpus=1, gpus=1)",
        "--gin_param=tune.num_workers = 3",
    ]


@pytest.mark.slow
def test_the_schemas_find_mistakes() -> None:
    for break_it in (
        lambda spec: spec["failurePolicy"].update(maxRestart=3),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(backofLimit=0),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].update(containers=[{}]),
    ):
        found = manifest("--workers=2")
        break_it(found["spec"])
        with pytest.raises(jsonschema.ValidationError):
            check_job_set(found)


def test_each_pod_gets_its_place_under_its_dns_name() -> None:
    found = manifest("--workers=3", "--name=night", "--port=4000")
    container = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    texts = {each["name"]: each.get("value") for each in container["env"]}
    names = [each["name"] for each in container["env"]]
    assert names.index("TASK_INDEX") < names.index("TF_CONFIG")  # else Kubernetes leaves $(TASK_INDEX) as it is
    for index in range(3):
        cluster = read_tf_config({"TF_CONFIG": texts["TF_CONFIG"].replace("$(TASK_INDEX)", str(index))})
        assert cluster is not None and cluster.address == f"night-worker-0-{index}.night:4000"
    assert found["spec"]["network"]["subdomain"] == "night"


def test_the_failure_policy_tells_preemption_from_mistakes() -> None:
    found = manifest("--workers=2", "--restarts=5")["spec"]
    job = found["replicatedJobs"][0]["template"]["spec"]
    by_status = {
        status: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_status == {EXIT_USER_ERROR: "FailJob", 3: "FailJob", EXIT_PREEMPTED: "Ignore"}
    assert job["podFailurePolicy"]["rules"][-1]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert found["failurePolicy"]["maxRestarts"] == 5
    assert found["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_machines_with_the_right_accelerators_are_asked_for() -> None:
    def pod(*options: str) -> dict[str, Any]:
        return manifest(*options)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]

    gpus = pod("--workers=2", "--gpus=4", "--accelerator=nvidia-tesla-t4")
    assert gpus["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
    assert gpus["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    tpus = pod("--accelerator=v6e-4")
    assert tpus["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2"
    assert tpus["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert gpus["terminationGracePeriodSeconds"] == 120


def test_secrets_stand_there_by_reference() -> None:
    text = printed("kubernetes", "--image=a:1", *EVERYTHING)
    container = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    variables = {each["name"]: each for each in container["containers"][0]["env"]}
    assert variables["WANDB_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "key"}}
    assert variables["GOOGLE_APPLICATION_CREDENTIALS"]["value"].endswith("/key.json")
    text = printed("tpu_vm", "--zone=us-central2-b", "--accelerator=v4-8", "--secret_env=WANDB_API_KEY=wandb")
    assert "gcloud secrets versions access latest --secret=wandb" in text
    for scheduler, option in [
        ("kubernetes", "--env=WANDB_API_KEY=s3cr3t"),
        ("kubernetes", "--secret_env=s3cr3t"),
        ("kubernetes", "--secret_env=WANDB_API_KEY=s3cr3t"),
        ("tpu_vm", "--env=HF_TOKEN=s3cr3t"),
    ]:
        with pytest.raises(UserError) as caught:
            needed = ["--image=a:1"] if scheduler == "kubernetes" else ["--zone=us-central2-b", "--accelerator=v4-8"]
            printed(scheduler, *needed, option)
        assert "secret" in str(caught.value).lower()
        assert "=s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--print=slum", "--", DIGITS], "Did you mean 'slurm'"),
        (["--print"], "--print is one of"),
        (["--print=slurm", "--", DIGITS, "--run_dir=r"], "--time"),
        (["--print=slurm", "--time=1:0:0", "--wrokers=2", "--", DIGITS, "--run_dir=r"], "Did you mean: workers ?"),
        (["--print=slurm", "--time=90", "--", DIGITS, "--run_dir=r"], "HOURS:MINUTES:SECONDS"),
        (
            ["--print=slurm", "--time=1:0:0", "--workers=0", "--", DIGITS, "--run_dir=r"],
            "in the range [1, 9999]",
        ),
        (
            ["--print=slurm", "--time=1:0:0", "--workers=1" + 9 * "0", "--", DIGITS, "--run_dir=r"],
            "in the range [1, 9999]",
        ),
        (["--print=slurm", "--time=1:0:0", "--memory=much", "--", DIGITS, "--run_dir=r"], "16G"),
        (["--print=slurm", "--time=1:0:0", "--", DIGITS], "--run_dir"),
        (["--print=slurm", "--time=1:0:0", "--", "--run_dir=r"], "No experiment"),
        (["--print=slurm", "--time=1:0:0", "--", "--gin_file=nowhere.gin", "--run_dir=r"], "nowhere.gin"),
        (["--print=kubernetes", "--image=a", "--", DIGITS, "--run_dir=gs://b/r"], "tag or digest"),
        (["--print=kubernetes", "--image=a:1", "--", DIGITS, "--run_dir=runs/r"], "lost with it"),
        (
            ["--print=kubernetes", "--image=a:1", "--accelerator=nvidia-l4", "--", DIGITS, "--run_dir=gs://b/r"],
            "--gpus",
        ),
        (["--print=kubernetes", "--image=a:1", "--name=Big", "--", DIGITS, "--run_dir=gs://b/r"], "small letters"),
        (
            ["--print=tpu_vm", "--zone=us-central2-b", "--accelerator=v4-32", "--", DIGITS, "--run_dir=gs://b/r"],
            "--accelerator=v4-32 has several hosts, each of which must run TensorFlow's server",
        ),
        (
            ["--print=kubernetes", "--image=a:1", "--accelerator=v4-32", "--", DIGITS, "--run_dir=gs://b/r"],
            "on GKE tfdist trains on the TPUs of one",
        ),
        (["--print=tpu_vm", "--zone=here", "--accelerator=v4-8", "--", DIGITS, "--run_dir=gs://b/r"], "a zone"),
        (["--print=tpu_vm", "--zone=us-central2-b", "--accelerator=v4-8", "--", DIGITS, "--run_dir=r"], "lost with"),
        (["--print=horovod", "--", DIGITS, "--run_dir=r"], "--hosts"),
        (["--print=horovod", "--hosts=a", "--", DIGITS, "--run_dir=r"], "HOST:SLOTS"),
        (["--print=horovod", "--hosts=a:2", "--min_workers=3", "--", DIGITS, "--run_dir=r"], "2 slots"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        command.printed(arguments)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_prints_or_ends_with_2(run_python: Callable[..., support.Finished]) -> None:
    good = run_python(
        ["-m", "tfdist.launch", "--print=slurm", "--time=1:00:00", "--", DIGITS, "--run_dir=r"], cwd=support.REPOSITORY
    )
    assert good.check().stdout.startswith("#!/bin/bash\n") and good.stderr == ""
    bad = run_python(["-m", "tfdist.launch", "--print=slurm", "--", DIGITS, "--run_dir=r"], cwd=support.REPOSITORY)
    assert (bad.status, bad.stdout) == (EXIT_USER_ERROR, "")


def test_a_slice_of_several_hosts_is_trained_on_from_its_first() -> None:
    image = "--runtime_version=tpu-vm-tf-2.20.0-pod-pjrt"
    text = printed("tpu_vm", "--zone=us-central2-b", "--accelerator=v4-32", "--name=large", "--spot", image)
    assert "--worker=all" not in text and text.count("--worker=0") == 3
    assert "exec env TPU_NAME=large TPU_LOAD_LIBRARY=0 .venv/bin/python -m tfdist.main" in text
    assert "--accelerator-type=v4-32" in text and "--runtime-version=tpu-vm-tf-2.20.0-pod-pjrt" in text


SCRIPTS = {
    "slurm": ["--time=1:00:00", "--workers=2", "--gpus=8", "--setup=module load cuda", "--partition=gpu"],
    "tpu_vm": ["--zone=us-central2-b", "--accelerator=v5litepod-8", "--spot", "--secret_env=A_KEY=a", "--env=B=c d"],
    "horovod": ["--hosts=a:2,b:2", "--min_workers=2"],
    "ray_slurm": ["--workers=2", "--gpus=4", "--time=1:00:00", "--setup=module load cuda"],
}


@pytest.mark.parametrize("scheduler", SCRIPTS)
def test_scripts_are_shell(scheduler: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(printed(scheduler, *SCRIPTS[scheduler], "--name=x"))
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_paths_can_be_given() -> None:
    text = printed("slurm", "--time=1:00:00", "--python=/opt/venv/bin/python", "--output=/logs/%j.out")
    assert "/opt/venv/bin/python -m tfdist.launch.slurm_worker" in text and "--output=/logs/%j.out" in text


def test_arguments_with_spaces_and_quotes_stay_one_word(tmp_path: pathlib.Path) -> None:
    odd = """--gin_param=train.tag = 'a "b" $HOME'"""
    stubs = write_stubs(tmp_path, srun='printf "%s\\n" "$@" >"$STUBS/srun.words"', scontrol="echo localhost")
    text = command.printed(["--print=slurm", "--time=1:0:0", "--", DIGITS, "--run_dir=r", odd])
    assert run_script(text, stubs, tmp_path).status == 0
    assert odd in (stubs / "srun.words").read_text().splitlines()


def write_stubs(directory: pathlib.Path, **programs: str) -> pathlib.Path:
    """Makes commands that stand in for a scheduler's, from the bodies of shell scripts."""
    stubs = directory / "stubs"
    stubs.mkdir()
    for name, body in programs.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    return stubs


def run_script(text: str, stubs: pathlib.Path, directory: pathlib.Path, **variables: str) -> support.Finished:
    script = directory / "script.sh"
    script.write_text(text)
    environment = {
        "PATH": os.pathsep.join([str(stubs), os.path.dirname(sys.executable), os.environ["PATH"]]),
        "STUBS": str(stubs),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        **variables,
    }
    return support.run_command(["bash", str(script)], env=environment, timeout=240, cwd=support.REPOSITORY)


# Starts two tasks of this machine as `srun` would, passes the signal before the time limit to them once training has
# got somewhere, where it is asked to, and ends with the highest status.
SRUN = """
while [[ "$1" == --* ]]; do shift; done
export SLURM_NTASKS=2
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
if [[ -n "${SIGNAL_WHEN:-}" ]]; then
    until [[ -s "$SIGNAL_WHEN" ]]; do kill -0 $first || break; sleep 0.05; done
    kill -USR1 $first $second
fi
wait $first; status=$?
wait $second; other=$?
exit $((status > other ? status : other))
"""
SCONTROL = """
case "$1" in
    show) [[ "$2" == job ]] && echo "JobState=${JOB_STATE:-RUNNING}" || printf 'localhost\\n127.0.0.1\\n' ;;
    requeue) echo "$2" >>"$STUBS/requeued" ;;
esac
"""


@pytest.mark.slow
def test_an_sbatch_script_trains_is_preempted_and_goes_on(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["--print=slurm", "--workers=2", "--time=1:00:00", "--save_seconds=60", "--", DIGITS]
    text = command.printed([*arguments, f"--run_dir={run_dir}", "--gin_param=train.epochs = 40"])
    stubs = write_stubs(tmp_path, srun=SRUN, scontrol=SCONTROL)
    first = run_script(text, stubs, tmp_path, SIGNAL_WHEN=str(run_dir / "metrics.jsonl"))
    assert first.status == EXIT_PREEMPTED, first.outputs()
    assert (stubs / "requeued").read_text() == f"{os.getpid()}\n"
    second = run_script(text, stubs, tmp_path, SLURM_RESTART_COUNT="1").check()
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["num_workers"], result["epochs"], result["strategy"]) == (2, 40, "multi_worker"), second.outputs()
    assert result["resumed_from_step"]
    assert (stubs / "requeued").read_text() == f"{os.getpid()}\n"


# Runs what a step of Slurm would, on this machine, whose nodes have addresses of loopback.
RAY_SRUN = 'while [[ "$1" == --* ]]; do shift; done; exec "$@"'
RAY_SCONTROL = SCONTROL.replace("localhost", "127.0.0.2").replace("127.0.0.1", "127.0.0.3")


@pytest.mark.slow
def test_a_script_for_ray_on_slurm_trains_is_preempted_and_goes_on(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["--print=ray_slurm", "--workers=2", "--time=1:00:00", "--save_seconds=60", "--", DIGITS]
    text = command.printed([*arguments, f"--run_dir={run_dir}", "--gin_param=train.epochs = 40"])
    stubs = write_stubs(tmp_path, srun=RAY_SRUN, scontrol=RAY_SCONTROL)
    signalled = text.replace(
        "trap ", f"(until [[ -s {run_dir}/metrics.jsonl ]]; do sleep 0.1; done; kill -USR1 $$) &\ntrap "
    )
    first = run_script(signalled, stubs, tmp_path)
    assert first.status == EXIT_PREEMPTED, first.outputs()
    assert (stubs / "requeued").read_text() == f"{os.getpid()}\n"
    second = run_script(text, stubs, tmp_path, SLURM_RESTART_COUNT="1").check()
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["num_workers"], result["epochs"], result["strategy"]) == (2, 40, "multi_worker"), second.outputs()
    assert result["resumed_from_step"]
    assert "worker 1 on 127.0.0.3" in second.stderr, second.outputs()


@pytest.mark.parametrize(
    ("status", "restarts", "is_requeued"),
    [(0, 0, False), (EXIT_PREEMPTED, 99, True), (EXIT_PEER_LOST, 0, True), (137, 2, True), (137, 3, False)]
    + [(status, 0, False) for status in (2, 3)],
)
def test_an_ended_job_goes_back_into_the_queue_only_where_that_can_help(
    tmp_path: pathlib.Path, status: int, restarts: int, is_requeued: bool
) -> None:
    stubs = write_stubs(tmp_path, srun=f"exit {status}", scontrol=SCONTROL)
    text = printed("slurm", "--time=1:00:00", "--restarts=3")
    assert run_script(text, stubs, tmp_path, SLURM_RESTART_COUNT=str(restarts)).status == status
    assert (stubs / "requeued").exists() == is_requeued


@pytest.mark.parametrize("status", [EXIT_PREEMPTED, 137])
def test_a_job_that_was_cancelled_stays_so(tmp_path: pathlib.Path, status: int) -> None:
    stubs = write_stubs(tmp_path, srun=f"exit {status}", scontrol=SCONTROL)
    finished = run_script(printed("slurm", "--time=1:00:00"), stubs, tmp_path, JOB_STATE="CANCELLED")
    assert finished.status == status and not (stubs / "requeued").exists()


def test_a_task_of_a_job_gets_its_tf_config() -> None:
    task = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    words = ["--hosts=node1,node2", "--port=20001", "--", DIGITS]
    became, variables = slurm_worker.prepare(words, task)
    assert became[1:] == ["-m", "tfdist.main", DIGITS]
    cluster = read_tf_config(variables)
    assert cluster is not None and (cluster.workers, cluster.worker_index) == (("node1:20001", "node2:20002"), 1)
    alone = slurm_worker.prepare(["--hosts=node1", "--port=20001", "--", DIGITS], {**task, "SLURM_NTASKS": "1"})
    assert "TF_CONFIG" not in alone[1]
    for environment, expected in [
        ({}, "no task of a Slurm job"),
        ({**task, "SLURM_NTASKS": "4"}, "4 tasks on 2 hosts"),
    ]:
        with pytest.raises(UserError, match=expected):
            slurm_worker.prepare(words, environment)


# Each use of `gcloud … ssh` for the training takes the next status; the resource is there at the second question.
GCLOUD = """
echo "$*" >>"$STUBS/calls"
case "$*" in
    *describe*) [[ -e "$STUBS/asked" ]] && echo ACTIVE || { touch "$STUBS/asked"; echo WAITING_FOR_RESOURCES; } ;;
    *tfdist.main*)
        status="$(head -n 1 "$STUBS/statuses")"
        sed -i 1d "$STUBS/statuses"
        exit "$status"
        ;;
esac
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statuses", "starts"), [([0], 1), ([2], 1), ([143, 143, 1, 0], 4), ([1, 1], 2), ([143, 255, 3], 3)]
)
def test_a_tpu_vm_is_always_given_back(tmp_path: pathlib.Path, statuses: list[int], starts: int) -> None:
    stubs = write_stubs(tmp_path, gcloud=GCLOUD)
    (stubs / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    text = printed("tpu_vm", "--zone=us-central2-b", "--accelerator=v4-8", "--restarts=1")
    finished = run_script(text, stubs, tmp_path, POLL_SECONDS="0.01")
    assert finished.status == statuses[starts - 1], finished.outputs()
    calls = [line for line in (stubs / "calls").read_text().splitlines() if "queued-resources describe" not in line]
    kinds = [next(k for k in ("create", "scp", "main", "ssh", "delete") if f"{k} " in f"{call} ") for call in calls]
    assert kinds == ["create", "scp", "ssh", "main", "delete"] * starts
    assert all("--zone=us-central2-b" in call for call in calls)


def test_a_tpu_vm_of_somebody_else_is_not_deleted(tmp_path: pathlib.Path) -> None:
    stubs = write_stubs(tmp_path, gcloud='echo "$*" >>"$STUBS/calls"; [[ "$*" != *" create "* ]]')
    text = printed("tpu_vm", "--zone=us-central2-b", "--accelerator=v4-8", "--restarts=0")
    assert run_script(text, stubs, tmp_path).status == 1
    assert "delete" not in (stubs / "calls").read_text()


@pytest.mark.slow
def test_a_tpu_vm_is_given_back_when_the_script_is_ended(tmp_path: pathlib.Path) -> None:
    ended = '*tfdist.main*) kill -TERM "$PPID"; sleep 0.2 ;;'
    stubs = write_stubs(tmp_path, gcloud=GCLOUD.replace("*tfdist.main*)", f"{ended}\n    never)"))
    text = printed("tpu_vm", "--zone=us-central2-b", "--accelerator=v4-8")
    assert run_script(text, stubs, tmp_path, POLL_SECONDS="0.01").status
    assert "delete digits " in (stubs / "calls").read_text().splitlines()[-1]


def test_horovodrun_is_started_again_with_the_hosts_that_answer(tmp_path: pathlib.Path) -> None:
    horovodrun = """
script="$(sed -n 's/.*--host-discovery-script \\([^ ]*\\).*/\\1/p' <<<"$*")"
"$script" >>"$STUBS/found"
[[ "$(wc -l <"$STUBS/found")" -ge 2 ]]
"""
    stubs = write_stubs(tmp_path, horovodrun=horovodrun, ssh='[[ "$*" == *good* ]]', sleep="exit 0")
    text = printed("horovod", "--python=true", "--hosts=good:2,dead:2", "--min_workers=2")
    assert "-m tfdist.launch.horovod.elastic_worker -- --gin_file=" in text
    assert run_script(text, stubs, tmp_path).check().stderr.count("start 2 in 2 s") == 1
    assert (stubs / "found").read_text() == "good:2\n" * 2
    refused = printed("horovod", "--python=false", "--hosts=good:2", "--restarts=0")
    assert run_script(refused, stubs, tmp_path).status == 1 and (stubs / "found").read_text() == "good:2\n" * 2


@pytest.mark.slow
def test_the_doctor_takes_the_place_of_the_training() -> None:
    words = [f"--gin_file={DIGITS.partition('=')[2]}", "--gin_param=train.epochs = 3", "--run_dir=gs://bucket/run"]
    given = ["--", *words, "--verbose"]
    found = yaml.safe_load(command.printed(["--print=kubernetes", "--image=a:1", "--workers=2", "--doctor", *given]))
    check_job_set(found)
    container = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", "tfdist.doctor", *words]
    assert found["metadata"]["name"] == "digits-doctor" and found["spec"]["failurePolicy"]["maxRestarts"] == 0
    text = command.printed(["--print=slurm", "--time=0:10:00", "--workers=2", "--doctor", *given])
    assert "--module=tfdist.doctor" in text and "--verbose" not in text
    text = command.printed(["--print=horovod", "--hosts=a:1,b:1", "--doctor", *given])
    assert "python -m tfdist.doctor" in text and "validate" not in text


@pytest.mark.slow
def test_help_lists_the_options_of_each_scheduler() -> None:
    for scheduler in command.SCHEDULERS:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
            command.printed([f"--print={scheduler}", "--help"])
        assert ended.value.code == 0 and re.search(r"--restarts", shown.getvalue())
