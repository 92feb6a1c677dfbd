"""`--print=kfp`, `vertex` and `airflow`: run by kfp's local runner and a real Airflow, checked by Vertex AI's types.

Each is in an environment of its own, in the user's cache: kfp holds protobuf back, Airflow brings a hundred packages.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support
import yaml

from tfdist.errors import EXIT_DIVERGED, EXIT_PEER_LOST, EXIT_USER_ERROR, UserError
from tfdist.launch.printing import command
from tfdist.tpu_compiler import toolchain

KFP = ("kfp==2.17.3",)
VERTEX = ("google-cloud-aiplatform==2.7.0", "cloudml-hypertune==0.1.0.dev6")
AIRFLOW = ("apache-airflow==3.3.2", "apache-airflow-providers-standard==1.21.0")
DIGITS = ["--gin_file=configs/experiments/digits.gin", "--gin_param=train.epochs = 2"]
DIGITS += ["--gin_param=train.deterministic = True"]
IMAGE = "--image=registry/tfdist-python:1"
MACHINE = [IMAGE, "--machine_type=n1-standard-8"]
HERE = Path(__file__).parent
# In the place of Python: notes what it is asked to do, and ends a training with the next status that it was given.
STUB = """#!/bin/bash
cd "$(dirname "$0")"
mode="$(sed -n 's/.*--mode=\\([a-z]*\\).*/\\1/p' <<<"$*")"
echo "${mode:-outcome}" >>ran
[[ -n "$mode" ]] || echo '{"model": "export/model.keras", "result": {}, "evaluation": {}}'
[[ "$mode" == train ]] || exit 0
status="$(head -n 1 statuses)"
sed -i 1d statuses
exit "$status"
"""


def python_with(packages: tuple[str, ...]) -> Path:
    try:
        return toolchain.python_with(packages, name="pipelines", tell=print)
    except UserError as error:
        pytest.skip(str(error))


def printed(kind: str, *options: str, arguments: list[str] = DIGITS, run_dir: str = "gs://bucket/run") -> str:
    return command.printed([f"--print={kind}", *options, "--", *arguments, f"--run_dir={run_dir}"])


def write_program(directory: Path, text: str) -> str:
    """Writes what stands for Python on the machines of a pipeline, and returns the flag that names it."""
    program = directory / "program"
    program.write_text(text)
    program.chmod(0o755)
    return f"--python={program}"


def write_stub(directory: Path, *statuses: int) -> str:
    (directory / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    return write_program(directory, STUB)


def run_pipeline(directory: Path, *options: str) -> support.Finished:
    file = directory / "pipeline.py"
    text = printed("kfp", IMAGE, "--at_least=accuracy=0.8", *options)
    file.write_text(text.replace('backoff_duration="30s"', 'backoff_duration="1s"'))
    words = [python_with(KFP), HERE / "kfp_local.py", file, directory / "run"]
    # The checkout has a folder docker/, which kfp would take for the package.
    return support.run_command(words, cwd=support.REPOSITORY, env={"PYTHONPATH": None}, timeout=240)


@pytest.mark.slow
def test_the_steps_of_a_kfp_pipeline_end_with_what_the_command_ends_with(tmp_path: Path) -> None:
    python = write_program(tmp_path, f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')  # kfp replaces the word python3
    options = [python, f"--env=PYTHONPATH={support.REPOSITORY}", f"--prepare=touch {tmp_path}/prepared"]
    finished = run_pipeline(tmp_path, *options).check()
    run_dir = tmp_path / "run"
    alone = [*DIGITS, f"--run_dir={tmp_path / 'alone'}"]
    support.run_python(["-m", "tfdist.main", *alone], cwd=support.REPOSITORY).check()
    expected = json.loads((tmp_path / "alone" / "result.json").read_text())["eval_metrics"]
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    assert {name: evaluation[name] for name in expected} == expected and expected["accuracy"] > 0.8
    assert (tmp_path / "prepared").exists() and (run_dir / "export" / "saved_model").is_dir()
    outputs = {
        each.parent.name: json.loads(each.read_text()) for each in tmp_path.glob("run.kfp/*/*/executor_output.json")
    }
    model = outputs["train"]["artifacts"]["model"]["artifacts"][0]
    assert model["uri"] == str(run_dir / "export" / "model.keras") and model["metadata"] == {"run_dir": str(run_dir)}
    metrics = outputs["evaluate"]["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metrics == {**expected, "run_dir": str(run_dir), "model": model["uri"]}, finished.outputs()
    for options, status in [
        (["--at_least=accuracy=0.999"], 2),
        (["--at_most=acuracy=1"], 2),
        (["--at_most=loss=1"], 0),
    ]:
        gate = support.run_python(["-m", "tfdist.launch.outcome", f"--run_dir={run_dir}", *options])
        assert gate.status == status and bool(gate.stdout) == (status == 0), gate.outputs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statuses", "ran"),
    [
        ([EXIT_PEER_LOST, 0], "validate train train outcome evaluate outcome outcome export"),
        ([EXIT_DIVERGED], "validate train"),
    ],
)
def test_kfp_repeats_a_training_only_where_that_can_help(tmp_path: Path, statuses: list[int], ran: str) -> None:
    finished = run_pipeline(tmp_path, write_stub(tmp_path, *statuses))
    assert (tmp_path / "ran").read_text().split() == ran.split(), finished.outputs()
    assert bool(finished.status) == ("the training ended with status 3" in finished.stdout) == (statuses[-1] != 0)


@pytest.mark.slow
def test_a_pipeline_compiles_with_retries_and_one_cached_step(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.py"
    options = [
        "--gpus=2",
        "--cpus=8",
        "--memory=32Gi",
        "--env=NCCL_DEBUG=WARN",
        "--restarts=5",
        "--prepare=echo 'a \"b'",
    ]
    file.write_text(printed("kfp", IMAGE, "--at_most=loss=0.5", "--name=night", *options))
    support.run_command([python_with(KFP), file], cwd=tmp_path, env={"PYTHONPATH": None}).check()
    compiled = next(yaml.safe_load_all((tmp_path / "night.yaml").read_text()))
    tasks = compiled["root"]["dag"]["tasks"]
    assert [name for name, task in tasks.items() if task["cachingOptions"]] == ["prepare"]
    assert {name: task["retryPolicy"]["maxRetryCount"] for name, task in tasks.items() if "retryPolicy" in task} == {
        "train": 5
    }
    before = {name: set(task.get("dependentTasks", ())) for name, task in tasks.items()}
    assert before["validate"] == {"prepare"} and before["train"] == {"validate"} and "gate" in before["export"]
    container = compiled["deploymentSpec"]["executors"]["exec-train"]["container"]
    assert container["image"] == IMAGE.partition("=")[2] and container["env"] == [
        {"name": "NCCL_DEBUG", "value": "WARN"}
    ]
    assert container["resources"]["accelerator"]["resourceCount"] == "2"


@pytest.fixture(scope="module")
def airflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("airflow")
    (home / "dags").mkdir()
    run_airflow(home, "db", "migrate").check()
    return home


def run_airflow(home: Path, *words: str) -> support.Finished:
    variables = {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "PYTHONPATH": None}
    return support.run_command([python_with(AIRFLOW).with_name("airflow"), *words], env=variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statuses", "is_done", "ran"),
    [
        ([EXIT_PEER_LOST, 0], True, ["validate", "train", "train", "evaluate", "outcome", "export"]),
        ([EXIT_USER_ERROR], False, ["validate", "train"]),
    ],
)
def test_airflow_runs_the_tasks_and_repeats_a_training_only_where_that_can_help(
    airflow_home: Path, tmp_path: Path, statuses: list[int], is_done: bool, ran: list[str]
) -> None:
    options = [write_stub(tmp_path, *statuses), f"--working_dir={tmp_path}", f"--prepare=touch {tmp_path}/prepared"]
    text = printed("airflow", "--at_least=accuracy=0.8", *options, run_dir="runs/digits")
    (airflow_home / "dags" / "digits.py").write_text(text.replace("seconds=30", "seconds=0"))
    finished = run_airflow(airflow_home, "dags", "test", "digits")
    assert (tmp_path / "ran").read_text().split() == ran, finished.outputs()
    assert (tmp_path / "prepared").exists()
    assert ("successful" if is_done else "failed") in re.findall("Marking run .* (successful|failed)", finished.stdout)


SEARCH = ["--search=keras.optimizers.Adam.learning_rate=1e-4:1e-1:log", "--search=train.global_batch_size=32,64"]
SEARCH += ["--search=train.epochs=1:3", "--maximize=accuracy"]


@pytest.mark.slow
def test_jobs_of_vertex_ai_have_its_fields(tmp_path: Path) -> None:
    options = ["--workers=3", "--gpus=2", "--accelerator=NVIDIA_L4", "--spot", "--time=6h", "--env=NCCL_DEBUG=WARN"]
    options += ["--service_account=trainer@project.iam.gserviceaccount.com", "--network=projects/1/global/networks/n"]
    jobs = [yaml.safe_load(printed("vertex", *MACHINE, *each)) for each in ([], options, [*SEARCH, "--time=2h"])]
    python = python_with(VERTEX)

    def check(*specs: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        lines = "".join(json.dumps(spec) + "\n" for spec in specs)
        return subprocess.run([python, HERE / "vertex_fields.py"], input=lines, text=True, capture_output=True)

    assert check(*jobs).stdout.split() == ["CustomJobSpec", "CustomJobSpec", "HyperparameterTuningJob"]
    assert [pool["replicaCount"] for pool in jobs[1]["workerPoolSpecs"]] == [1, 2]  # the first is TF_CONFIG's chief
    assert "--launcher=host" in jobs[1]["workerPoolSpecs"][1]["containerSpec"]["command"]
    jobs[2]["trialJobSpec"]["scheduling"]["timeOut"] = "1s"
    assert 'no field named "timeOut"' in check(jobs[2]).stderr


@pytest.mark.slow
def test_a_trial_trains_with_the_values_that_vertex_ai_gives_and_reports_its_metric(tmp_path: Path) -> None:
    job = yaml.safe_load(printed("vertex", *MACHINE, *SEARCH, arguments=DIGITS[:1]))
    words = job["trialJobSpec"]["workerPoolSpecs"][0]["containerSpec"]["command"][1:]
    words[-1] = f"--run_dir={tmp_path}"
    values = ["--keras.optimizers.Adam.learning_rate=0.004", "--train.global_batch_size=64.0", "--train.epochs=1"]
    metrics = tmp_path / "hypertune" / "output.metrics"
    variables = {"CLOUD_ML_TRIAL_ID": "7", "CLOUD_ML_HP_METRIC_FILE": str(metrics)}
    support.run_python([*words, *values], cwd=support.REPOSITORY, env=variables).check()
    result = json.loads((tmp_path / "trial-7" / "result.json").read_text())
    assert (result["epochs"], result["global_batch_size"]) == (1, 64)
    said = json.loads(metrics.read_text())
    assert (said["trial"], float(said["accuracy"])) == ("7", result["eval_metrics"]["accuracy"])
    report = "import hypertune; hypertune.HyperTune().report_hyperparameter_tuning_metric('accuracy', 0.5)"
    variables["CLOUD_ML_HP_METRIC_FILE"] = str(tmp_path / "theirs" / "output.metrics")
    support.run_command([python_with(VERTEX), "-c", report], env=variables | {"PYTHONPATH": ""}).check()
    theirs = json.loads((tmp_path / "theirs" / "output.metrics").read_text())
    assert {name: type(value) for name, value in said.items()} == {name: type(value) for name, value in theirs.items()}
    nowhere = support.run_python([*words, *values], cwd=support.REPOSITORY)
    assert nowhere.status == EXIT_USER_ERROR and "no trial of Vertex AI" in nowhere.stderr


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("kfp", [IMAGE], "--at_least=accuracy=0.95"),
        ("kfp", [IMAGE, "--at_least=accuracy"], "METRIC=NUMBER"),
        ("kfp", [IMAGE, "--at_least=accuracy=nan"], "METRIC=NUMBER"),
        ("kfp", [IMAGE, "--at_least=accuracy=1", "--workers=2"], "leave --workers out"),
        ("kfp", ["--at_least=accuracy=1"], "--image"),
        ("airflow", ["--at_least=accuracy=1"], "--working_dir"),
        ("airflow", ["--at_least=accuracy=1", "--working_dir=/a", "--gpus=1"], "leave --gpus out"),
        ("vertex", [IMAGE], "--machine_type"),
        ("vertex", [*MACHINE, "--gpus=1"], "belong together"),
        ("vertex", [*MACHINE, "--search=rate=1:2", "--minimize=loss"], "SETTING=LOW:HIGH"),
        ("vertex", [*MACHINE, "--search=a.rate=2:1", "--minimize=loss"], "ascending"),
        ("vertex", [*MACHINE, "--search=a.rate=0:1:log", "--minimize=loss"], "LOW above 0"),
        ("vertex", [*MACHINE, "--search=a.rate=0:1"], "--maximize=METRIC"),
        ("vertex", [*MACHINE, "--minimize=loss"], "leave --minimize out"),
        ("vertex", [*MACHINE, *SEARCH, "--workers=2"], "leave --workers out"),
    ],
)
def test_a_mistake_is_one_message(kind: str, options: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        printed(kind, *options)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "options"), [("kfp", [IMAGE, "--at_least=loss=1"]), ("vertex", MACHINE)])
def test_a_run_directory_of_a_container_is_refused(kind: str, options: list[str]) -> None:
    with pytest.raises(UserError, match="gs://BUCKET"):
        printed(kind, *options, run_dir="runs/x")
