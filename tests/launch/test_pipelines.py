"""examples/pipelines: run by kfp's local runner and a real Airflow, checked by Vertex AI's types.

Each is in an environment of its own, in the user's cache: kfp holds protobuf back, Airflow brings a hundred packages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import support
import yaml

from tfdist.errors import EXIT_DIVERGED, EXIT_PEER_LOST, EXIT_USER_ERROR, UserError
from tfdist.tpu_compiler import toolchain

PIPELINES = support.REPOSITORY / "examples" / "pipelines"
KFP = ("kfp==2.17.3",)
VERTEX = ("google-cloud-aiplatform==2.7.0", "cloudml-hypertune==0.1.0.dev6")
AIRFLOW = ("apache-airflow==3.3.2", "apache-airflow-providers-standard==1.21.0")
SHORT = '"--gin_param=train.epochs = 2", "--gin_param=train.deterministic = True"'
HERE = Path(__file__).parent
# Instead of Python: notes what it is asked to do, and ends a training with the next status that it was given.
STUB = """#!/bin/bash
cd "$(dirname "$0")"
mode="$(sed -n 's/.*--mode=\\([a-z]*\\).*/\\1/p' <<<"$*")"
echo "${mode:-read}" >>ran
[[ -n "$mode" ]] || echo '{"eval_metrics": {"accuracy": 0.96}, "accuracy": 0.96, "evaluated": {}}'
[[ "$mode" == train ]] || exit 0
status="$(head -n 1 statuses)"
sed -i 1d statuses
exit "$status"
"""


def python_with(packages: tuple[str, ...]) -> Path:
    try:
        return toolchain.make_environment(packages, name="pipelines", notify=print)
    except UserError as error:
        pytest.skip(str(error))


def write_program(directory: Path, text: str) -> str:
    """Writes what stands for Python on the machines of a pipeline, and returns its path."""
    program = directory / "program"
    program.write_text(text)
    program.chmod(0o755)
    return str(program)


def write_stub(directory: Path, *statuses: int) -> str:
    (directory / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    return write_program(directory, STUB)


def run_pipeline(directory: Path, python: str, *, at_least: float = 0.8) -> support.Finished:
    file = directory / "pipeline.py"
    changes = {
        'PYTHON = "python"': f'PYTHON = "{python}"',
        'digits.gin"]': f'digits.gin", {SHORT}]',
        '"accuracy", 0.95': f'"accuracy", {at_least}',
        'backoff_duration="30s"': 'backoff_duration="1s"',
        "    return task\n": f'    task.set_env_variable("PYTHONPATH", "{support.REPOSITORY}")\n    return task\n',
    }
    file.write_text(support.read_changed(PIPELINES / "kfp_pipeline.py", changes))
    words = [python_with(KFP), HERE / "kfp_local.py", file, directory / "run"]
    # The checkout has a folder docker/, which kfp would take for the package.
    return support.run_command(words, cwd=support.REPOSITORY, env={"PYTHONPATH": None}, timeout=240)


@pytest.mark.slow
def test_the_steps_of_a_kfp_pipeline_end_with_what_the_command_ends_with(tmp_path: Path) -> None:
    python = write_program(tmp_path, f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')  # kfp replaces the word python3
    finished = run_pipeline(tmp_path, python).check()
    run_dir = tmp_path / "run"
    alone = ["--gin_file=configs/experiments/digits.gin", *json.loads(f"[{SHORT}]"), f"--run_dir={tmp_path / 'alone'}"]
    support.run_python(["-m", "tfdist.main", *alone], cwd=support.REPOSITORY).check()
    expected = json.loads((tmp_path / "alone" / "result.json").read_text())["eval_metrics"]
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    assert {name: evaluation[name] for name in expected} == expected and expected["accuracy"] > 0.8
    assert (run_dir / "export" / "saved_model").is_dir()
    outputs = {
        each.parent.name: json.loads(each.read_text()) for each in tmp_path.glob("run.kfp/*/*/executor_output.json")
    }
    model = outputs["train"]["artifacts"]["model"]["artifacts"][0]
    assert model["uri"] == str(run_dir / "export" / "model.keras") and model["metadata"] == {"run_dir": str(run_dir)}
    assert outputs["train"]["artifacts"]["metrics"]["artifacts"][0]["metadata"] == expected
    metrics = outputs["evaluate"]["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    assert metrics == {**expected, "run_dir": str(run_dir), "model": model["uri"]}, finished.outputs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statuses", "at_least", "ran", "message"),
    [
        ([EXIT_PEER_LOST, 0], 0.8, "validate train train read evaluate read export", ""),
        ([EXIT_DIVERGED], 0.8, "validate train", "the training ended with status 3"),
        ([0], 0.97, "validate train read evaluate read", "accuracy is 0.96, and not at least 0.97"),
    ],
)
def test_kfp_repeats_a_training_only_where_that_can_help(
    tmp_path: Path, statuses: list[int], at_least: float, ran: str, message: str
) -> None:
    finished = run_pipeline(tmp_path, write_stub(tmp_path, *statuses), at_least=at_least)
    assert (tmp_path / "ran").read_text().split() == ran.split(), finished.outputs()
    assert bool(finished.status) == bool(message) and message in finished.stdout


@pytest.mark.slow
def test_the_pipeline_compiles_with_retries_and_no_cache(tmp_path: Path) -> None:
    support.run_command(
        [python_with(KFP), PIPELINES / "kfp_pipeline.py"], cwd=tmp_path, env={"PYTHONPATH": None}
    ).check()
    compiled = next(yaml.safe_load_all((tmp_path / "digits.yaml").read_text()))
    tasks = compiled["root"]["dag"]["tasks"]
    assert not [name for name, task in tasks.items() if task["cachingOptions"]]
    retries = {name: task["retryPolicy"]["maxRetryCount"] for name, task in tasks.items() if "retryPolicy" in task}
    assert retries == {"train": 3}
    before = {name: set(task.get("dependentTasks", ())) for name, task in tasks.items()}
    assert before["train"] == {"validate"} and "gate" in before["export"]
    container = compiled["deploymentSpec"]["executors"]["exec-train"]["container"]
    assert container["image"].endswith("/tfdist:0.1.0")
    assert container["resources"]["accelerator"]["resourceCount"] == "1"


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
    ("trigger", "statuses", "is_done", "ran"),
    [
        ("CRON", [EXIT_PEER_LOST, 0], True, ["validate", "train", "train", "evaluate", "read", "export"]),
        ("ASSET", [EXIT_USER_ERROR], False, ["validate", "train"]),
    ],
)
def test_airflow_runs_the_tasks_and_repeats_a_training_only_where_that_can_help(
    airflow_home: Path, tmp_path: Path, trigger: str, statuses: list[int], is_done: bool, ran: list[str]
) -> None:
    changes = {
        'PYTHON = ".venv/bin/python"': f'PYTHON = "{write_stub(tmp_path, *statuses)}"',
        '"/opt/project"': f'"{tmp_path}"',
        "gs://bucket/digits": "runs/digits",
        "seconds=30": "seconds=0",
        f"{trigger} = None": {"CRON": 'CRON = "0 3 * * 1"', "ASSET": 'ASSET = "file:///data/digits.npz"'}[trigger],
    }
    (airflow_home / "dags" / "digits.py").write_text(support.read_changed(PIPELINES / "airflow_dag.py", changes))
    finished = run_airflow(airflow_home, "dags", "test", "digits")
    assert (tmp_path / "ran").read_text().split() == ran, finished.outputs()
    assert ("successful" if is_done else "failed") in re.findall("Marking run .* (successful|failed)", finished.stdout)


@pytest.mark.parametrize(("accuracy", "status"), [(0.95, 0), (0.9, EXIT_USER_ERROR), ("NaN", EXIT_USER_ERROR)])
def test_the_gate_of_airflow_compares_the_evaluation(tmp_path: Path, accuracy: Any, status: int) -> None:
    text = (PIPELINES / "airflow_dag.py").read_text()
    names: dict[str, Any] = {}
    exec(
        text[text.index("METRIC, AT_LEAST") : text.index("RETRIES")]
        + text[text.index("GATE =") : text.index("class ")],
        names,
    )
    (tmp_path / "evaluation.json").write_text(f'{{"accuracy": {accuracy}}}')
    finished = support.run_python(["-c", names["GATE"], f"--run_dir={tmp_path}"])
    assert finished.status == status and ("and not at least 0.95" in finished.stderr) == (status != 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [False, True], ids=["as it is", "with all options"])
def test_the_job_of_vertex_ai_has_its_fields(options: bool) -> None:
    text = (PIPELINES / "vertex.yaml").read_text()
    job = yaml.safe_load(support.uncomment(text) if options else text)
    python = python_with(VERTEX)

    def check(spec: dict[str, Any]) -> support.Finished:
        program = (
            "import json, sys; from google.protobuf import json_format; from google.cloud.aiplatform_v1.types import "
        )
        program += "CustomJobSpec; json_format.ParseDict(json.loads(sys.argv[1]), CustomJobSpec.pb()())"
        return support.run_command([python, "-c", program, json.dumps(spec)], env={"PYTHONPATH": None})

    check(job).check()
    first, others = job["workerPoolSpecs"]  # the first is TF_CONFIG's chief
    assert first["replicaCount"] == 1 and "--launcher=host" in others["containerSpec"]["command"]
    job["scheduling"]["timeOut"] = "1s"
    assert 'no field named "timeOut"' in check(job).stderr
