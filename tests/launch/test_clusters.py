"""examples/clusters: manifests against published schemas, scripts run with stand-ins for schedulers' commands."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import support
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tfdist.commands import launch
from tfdist.errors import EXIT_DIVERGED, EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_USER_ERROR
from tfdist.strategies.cluster.tf_config import read_tf_config

CLUSTERS = support.REPOSITORY / "examples" / "clusters"
MANIFESTS = ("jobset.yaml", "mpijob.yaml", "rayjob.yaml", "skypilot.yaml")
KUBERNETES = "1.33"
DIGITS = "--gin_file=configs/experiments/digits.gin"


def read(name: str, changes: Mapping[str, str] = {}) -> str:
    return support.read_changed(CLUSTERS / name, changes)


def manifest(name: str, *, options: bool = False) -> dict[str, Any]:
    """A manifest, with its options or without."""
    return yaml.safe_load(support.uncomment(read(name)) if options else read(name))


def pod_of(job_set: dict[str, Any]) -> dict[str, Any]:
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


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
    for kind in ("ResourceQuantity", "UtilIntstrIntOrString"):  # described as Python holds them, not as they are sent
        schema["$defs"].update({name: {} for name in schema["$defs"] if name.endswith(kind)})
    jsonschema.validate(found, schema)
    for each in found["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def check_pods(groups: Iterable[dict[str, Any]]) -> None:
    for each in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


both = pytest.mark.parametrize("options", [False, True], ids=["as it is", "with all options"])


@pytest.mark.slow
@both
def test_the_job_set_fits_the_published_schemas(options: bool) -> None:
    check_job_set(manifest("jobset.yaml", options=options))


@both
def test_the_mpi_job_has_pods_that_fit_the_published_schemas_and_starts_as_many_processes(options: bool) -> None:
    found = manifest("mpijob.yaml", options=options)
    replicas = found["spec"]["mpiReplicaSpecs"]
    check_pods(replicas.values())
    command = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    processes = found["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]
    assert command[command.index("-np") + 1] == str(processes)
    gpus = replicas["Worker"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == str(found["spec"]["slotsPerWorker"])


@both
def test_the_ray_job_has_pods_that_fit_the_published_schemas_and_wants_a_token(options: bool) -> None:
    found = manifest("rayjob.yaml", options=options)
    cluster = found["spec"]["rayClusterSpec"]
    check_pods([cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == importlib.metadata.version("ray")
    (workers,) = cluster["workerGroupSpecs"]
    words = found["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "tfdist.launch"] and f"--workers={workers['replicas']}" in words
    launch.parse(words[3:])
    asked = {name.removeprefix("num-"): amount for name, amount in workers["rayStartParams"].items()}
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert asked == {"cpus": limits["cpu"], "gpus": limits["nvidia.com/gpu"]}
    assert all(f"--{name}={amount}" in words for name, amount in asked.items())


def test_each_pod_gets_its_place_under_its_dns_name() -> None:
    found = manifest("jobset.yaml")
    name, job = found["metadata"]["name"], found["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pod_of(found)["containers"]
    texts = {each["name"]: each.get("value") for each in container["env"]}
    names = [each["name"] for each in container["env"]]
    assert names.index("TASK_INDEX") < names.index("TF_CONFIG")  # else Kubernetes leaves $(TASK_INDEX) as it is
    assert job["parallelism"] == job["completions"] == 2
    for index in range(2):
        cluster = read_tf_config({"TF_CONFIG": texts["TF_CONFIG"].replace("$(TASK_INDEX)", str(index))})
        assert cluster is not None and cluster.num_workers == 2
        assert cluster.address == f"{name}-worker-0-{index}.{name}:{container['ports'][0]['containerPort']}"
    assert found["spec"]["network"]["subdomain"] == name
    assert job["template"]["metadata"]["labels"] == {"app": name}


def test_the_failure_policy_tells_preemption_from_mistakes() -> None:
    found = manifest("jobset.yaml")["spec"]
    job = found["replicatedJobs"][0]["template"]["spec"]
    by_status = {
        status: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_status == {EXIT_USER_ERROR: "FailJob", EXIT_DIVERGED: "FailJob", EXIT_PREEMPTED: "Ignore"}
    assert job["podFailurePolicy"]["rules"][-1]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert found["failurePolicy"]["maxRestarts"] == 3
    assert found["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_no_secret_stands_in_a_manifest() -> None:
    for name in MANIFESTS:
        found = re.findall(r"(?:KEY|TOKEN|PASSWORD|CREDENTIALS)[A-Z_]*[:,] *(.*)", read(name))
        reference = re.compile(r"valueFrom: \{secretKeyRef|value: /var/run/secrets/|null\}$")
        assert all(reference.match(each) for each in found), found


@both
def test_a_skypilot_task_recovers_and_its_scripts_are_shell(options: bool) -> None:
    task = manifest("skypilot.yaml", options=options)
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 0}
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


@pytest.mark.slow
def test_each_machine_of_a_skypilot_task_is_a_worker(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    run = manifest("skypilot.yaml")["run"].replace(".venv/bin/python", sys.executable)
    # On one machine each worker needs a port of its own.
    run = run.replace("gs://bucket/digits", str(run_dir)).replace("$address:2222", "$address:$((port++))")
    environment = {"SKYPILOT_NODE_IPS": "127.0.0.2\n127.0.0.3", "port": str(support.free_ports(1)[0])}

    def start(rank: int) -> support.Finished:
        variables = environment | {"SKYPILOT_NODE_RANK": str(rank)}
        return support.run_command(["bash", "-c", run], env=variables, cwd=support.REPOSITORY, timeout=60)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for finished in pool.map(start, range(2)):
            finished.check()
    assert json.loads((run_dir / "result.json").read_text())["num_workers"] == 2


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
    by_default = ["env", "--default-signal=INT"]  # which a shell's background process ignores
    return support.run_command([*by_default, "bash", str(script)], env=environment, timeout=240, cwd=support.REPOSITORY)


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


def slurm(name: str = "slurm.sbatch", **changes: str) -> str:
    return read(name, {"    source .venv/bin/activate": "    true", **changes})


def test_a_task_of_a_job_gets_its_tf_config_and_an_argument_with_spaces_and_quotes_as_one_word(
    tmp_path: pathlib.Path,
) -> None:
    odd = """--gin_param=train.tag = 'a "b" $HOME'"""
    shown = 'while [[ "$1" == --* ]]; do shift; done; SLURM_PROCID=1 "$@"'
    python = 'printf "%s\\n" "${TF_CONFIG:-}" "$@"'
    stubs = write_stubs(tmp_path, srun=shown, scontrol="printf 'node1\\nnode2\\n'", python=python)
    text = slurm(**{"--run_dir=runs/digits)": f"--run_dir=r {shlex.quote(odd)})"})
    config, *became = run_script(text, stubs, tmp_path, SLURM_NTASKS="2").check().stdout.splitlines()
    cluster = read_tf_config({"TF_CONFIG": config})
    port = 20000 + os.getpid() % 10000
    assert cluster is not None and cluster.worker_index == 1
    assert cluster.workers == (f"node1:{port}", f"node2:{port + 1}")
    assert became == ["-u", "-m", "tfdist.main", DIGITS, "--run_dir=r", odd]
    alone = run_script(text, stubs, tmp_path, SLURM_NTASKS="1").check()
    assert alone.stdout.splitlines() == ["", *became]


# Runs what a step of Slurm would, on this machine, whose nodes have addresses of loopback.
RAY_SRUN = 'while [[ "$1" == --* ]]; do shift; done; exec "$@"'
RAY_SCONTROL = SCONTROL.replace("localhost", "127.0.0.2").replace("127.0.0.1", "127.0.0.3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slurm.sbatch", "ray.sbatch"])
def test_a_script_for_slurm_trains_is_preempted_and_resumes(tmp_path: pathlib.Path, name: str) -> None:
    run_dir = tmp_path / "run"
    changes = {"--run_dir=runs/digits": f"--run_dir={run_dir} '--gin_param=train.epochs = 40'"}
    if name == "slurm.sbatch":
        text = before = slurm(**changes)
        stubs = write_stubs(tmp_path, srun=SRUN, scontrol=SCONTROL)
    else:
        changes |= {"\ncpus=32\ngpus=8": "\ncpus=1\ngpus=0", "--workers=4": "--workers=2"}
        text = slurm(name, **changes)
        before = text.replace(
            "trap ", f"(until [[ -s {run_dir}/metrics.jsonl ]]; do sleep 0.1; done; kill -USR1 $$) &\ntrap "
        )
        stubs = write_stubs(tmp_path, srun=RAY_SRUN, scontrol=RAY_SCONTROL)
    first = run_script(before, stubs, tmp_path, SIGNAL_WHEN=str(run_dir / "metrics.jsonl"))
    assert first.status == EXIT_PREEMPTED, first.outputs()
    second = run_script(text, stubs, tmp_path, SLURM_RESTART_COUNT="1").check()
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["num_workers"], result["epochs"], result["strategy"]) == (2, 40, "multi_worker"), second.outputs()
    assert result["resumed_from_step"]
    assert (stubs / "requeued").read_text() == f"{os.getpid()}\n"  # once
    assert name == "slurm.sbatch" or "worker 1 on 127.0.0.3" in second.stderr, second.outputs()


ENDS = [(EXIT_PREEMPTED, "RUNNING", 99, True), (EXIT_PEER_LOST, "RUNNING", 0, True), (137, "RUNNING", 2, True)]
ENDS += [(137, "RUNNING", 3, False), *((status, "RUNNING", 0, False) for status in (0, EXIT_USER_ERROR, EXIT_DIVERGED))]
ENDS += [(status, "CANCELLED", 0, False) for status in (EXIT_PREEMPTED, 137)]
# A run that ends with a status, and a cluster that is there until it is ended.
RAY = """
case "$*" in
    *token_hex*) echo token ;;
    *scripts*start*) exec sleep 60 ;;
    *scripts*) ;;
    *) exit "$STATUS" ;;
esac
"""


@pytest.mark.parametrize("name", ["slurm.sbatch", "ray.sbatch"])
@pytest.mark.parametrize(("status", "state", "restarts", "is_requeued"), ENDS)
def test_an_ended_job_is_requeued_only_where_that_can_help(
    tmp_path: pathlib.Path, name: str, status: int, state: str, restarts: int, is_requeued: bool
) -> None:
    programs = {"srun": f"exit {status}"} if name == "slurm.sbatch" else {"srun": RAY_SRUN, "python": RAY}
    scontrol = SCONTROL if name == "slurm.sbatch" else RAY_SCONTROL
    stubs = write_stubs(tmp_path, scontrol=scontrol, **programs)
    variables = {"SLURM_RESTART_COUNT": str(restarts), "STATUS": str(status), "JOB_STATE": state}
    assert run_script(slurm(name), stubs, tmp_path, **variables).status == status
    assert (stubs / "requeued").exists() == is_requeued


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
    ("statuses", "starts"),
    [([0], 1), ([EXIT_USER_ERROR], 1), ([143, 143, 1, 0], 4), ([1, 1], 2), ([EXIT_PREEMPTED, 255, EXIT_DIVERGED], 3)],
)
def test_a_tpu_vm_is_always_given_back(tmp_path: pathlib.Path, statuses: list[int], starts: int) -> None:
    stubs = write_stubs(tmp_path, gcloud=GCLOUD)
    (stubs / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    text = read("tpu_vm.sh", {"max_restarts=3": "max_restarts=1"})
    finished = run_script(text, stubs, tmp_path, POLL_SECONDS="0.01")
    assert finished.status == statuses[starts - 1], finished.outputs()
    calls = [line for line in (stubs / "calls").read_text().splitlines() if "queued-resources describe" not in line]
    kinds = [next(k for k in ("create", "scp", "main", "ssh", "delete") if f"{k} " in f"{call} ") for call in calls]
    assert kinds == ["create", "scp", "ssh", "main", "delete"] * starts
    assert all("--zone=us-west4-a" in call for call in calls)


def test_a_tpu_vm_of_somebody_else_is_not_deleted(tmp_path: pathlib.Path) -> None:
    stubs = write_stubs(tmp_path, gcloud='echo "$*" >>"$STUBS/calls"; [[ "$*" != *" create "* ]]')
    assert run_script(read("tpu_vm.sh", {"max_restarts=3": "max_restarts=0"}), stubs, tmp_path).status == 1
    assert "delete" not in (stubs / "calls").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", ["TERM", "INT"])
def test_a_tpu_vm_is_given_back_when_the_script_is_ended(tmp_path: pathlib.Path, number: str) -> None:
    ended = f'*tfdist.main*) kill -{number} "$PPID"; sleep 0.2; exit 255 ;;'
    stubs = write_stubs(tmp_path, gcloud=GCLOUD.replace("*tfdist.main*)", f"{ended}\n    never)"))
    assert run_script(read("tpu_vm.sh"), stubs, tmp_path, POLL_SECONDS="0.01").status
    calls = (stubs / "calls").read_text().splitlines()
    assert "delete digits " in calls[-1] and sum("tfdist.main" in call for call in calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("has_several_hosts", [False, True])
def test_the_vm_runs_the_training(tmp_path: pathlib.Path, has_several_hosts: bool) -> None:
    stubs = write_stubs(tmp_path, gcloud=GCLOUD)
    (stubs / "statuses").write_text("0\n")
    changes = {"environment='true'": "environment='export A=\"b c\"'"}
    changes["--run_dir=gs://bucket/digits"] = "--run_dir=gs://bucket/digits '--gin_param=train.epochs = 2'"
    if has_several_hosts:
        changes["has_several_hosts=no"] = "has_several_hosts=yes"
    run_script(read("tpu_vm.sh", changes), stubs, tmp_path, POLL_SECONDS="0.01").check()
    calls = (stubs / "calls").read_text()
    (command,) = re.findall(r"--command=(cd tfdist && .*tfdist.main.*)", calls)
    (tmp_path / "tfdist" / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / "tfdist" / ".venv" / "bin" / "python"
    python.write_text('#!/bin/bash\necho "$A" "${TPU_NAME:-}" "${TPU_LOAD_LIBRARY:-}"; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    said = subprocess.run(["bash", "-c", command], cwd=tmp_path, text=True, check=True, capture_output=True).stdout
    where = "b c digits 0" if has_several_hosts else "b c  "
    arguments = [DIGITS, "--run_dir=gs://bucket/digits", "--gin_param=train.epochs = 2"]
    assert said.splitlines() == [where, "-m", "tfdist.main", *arguments]
    assert calls.count(f"--worker={'0' if has_several_hosts else 'all'} ") == 3
    assert ("oauth2client" in calls) == has_several_hosts


HOROVODRUN = """
echo "$*" >>"$STUBS/calls"
[[ "$(wc -l <"$STUBS/calls")" -ge 2 ]]
"""


def test_horovodrun_is_started_again_with_the_hosts_that_answer(tmp_path: pathlib.Path) -> None:
    stubs = write_stubs(tmp_path, horovodrun=HOROVODRUN, ssh='[[ "$*" == *good* ]]', sleep="exit 0")
    changes = {"hosts=(host1:4 host2:4)": "hosts=(first:4 good:2 dead:2)", "python=python": "python=true"}
    finished = run_script(read("horovodrun.sh", changes | {"min_slots=8": "min_slots=6"}), stubs, tmp_path).check()
    assert finished.stderr.count("start 2 in 2 s") == 1
    expected = f"--gloo -np 6 -H first:4,good:2 true -m tfdist.main {DIGITS} --run_dir=/shared/digits\n"
    assert (stubs / "calls").read_text() == expected * 2
    finished = run_script(read("horovodrun.sh", changes), stubs, tmp_path)
    assert finished.status == 1 and finished.stderr.count("only first:4,good:2 answered: 6 slots of 8") == 4
    refused = run_script(read("horovodrun.sh", changes | {"python=python": "python=false"}), stubs, tmp_path)
    assert refused.status == 1 and "start" not in refused.stderr
    assert (stubs / "calls").read_text() == expected * 2
