"""A DAG of Airflow 3 that validates, trains, evaluates, compares a metric with a bound and exports.

Change what stands in capitals below and copy the file into the folder of DAGs. Airflow's workers run the commands in
WORKING_DIR; Airflow's own environment needs no tfdist. A schedule, an event or a person starts it. With CRON or ASSET
each start has a directory of its own in `run_dir`, which is a parameter:

    airflow dags trigger digits --conf='{"run_dir": "gs://bucket/digits-2"}'

To prepare data, add `Command(task_id="prepare", command=["bash", "-c", "…"], run_dir="") >> validate`.
"""

import datetime
import os

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, Asset, BaseOperator, Param
from airflow.sdk.exceptions import AirflowException, AirflowFailException

NAME = "digits"
WORKING_DIR = "/opt/project"  # of gin files and your own modules, on all of Airflow's workers
PYTHON = ".venv/bin/python"
TFDIST = [PYTHON, "-m", "tfdist.main", "--gin_file=configs/experiments/digits.gin"]
RUN_DIR = "gs://bucket/digits"  # unless a start names another; all workers see it
METRIC, AT_LEAST = "accuracy", 0.95
CRON = None  # "0 3 * * 1" starts it on Mondays at three
ASSET = None  # "gs://bucket/digits.npz" starts it when another DAG has renewed that
RETRIES = 3  # of the training, which resumes from its newest checkpoint
ENVIRONMENT = {}  # no secrets

FINAL = (2, 3)  # a mistake of the user's, or the training diverged: again would be the same
GATE = f"""
import json, sys
from tfdist.storage import files
run_dir = sys.argv[1].removeprefix("--run_dir=")
value = json.loads(files.read(files.join(run_dir, "evaluation.json")))[{METRIC!r}]
if not value >= {AT_LEAST}:
    print({METRIC!r}, "is", value, "and not at least", {AT_LEAST}, file=sys.stderr)
    sys.exit(2)
"""


class Command(BaseOperator):
    """Runs a command; a status that is final fails the task at once, any other failure as often as it has retries."""

    template_fields = ("run_dir",)

    def __init__(self, *, command, run_dir, **settings):
        super().__init__(**settings)
        self.command = command
        self.run_dir = run_dir

    def execute(self, context):
        self.hook = SubprocessHook()
        command = [*self.command, f"--run_dir={self.run_dir}"] if self.run_dir else self.command
        status = self.hook.run_command(command, env={**os.environ, **ENVIRONMENT}, cwd=WORKING_DIR).exit_code
        if status in FINAL:
            raise AirflowFailException(f"ended with status {status}, and would again")
        if status:
            raise AirflowException(f"ended with status {status}")

    def on_kill(self):
        self.hook.send_sigterm()  # the training saves


with DAG(
    dag_id=NAME,
    schedule=[Asset(ASSET)] if ASSET else CRON,
    catchup=False,
    max_active_runs=1,  # a run directory belongs to one training at a time
    params={"run_dir": Param(RUN_DIR, type="string")},
    default_args={"run_dir": "{{ params.run_dir }}" + ("/{{ run_id }}" if CRON or ASSET else ""), "retries": 0},
):
    validate = Command(task_id="validate", command=[*TFDIST, "--mode=validate"])
    train = Command(
        task_id="train",
        command=[*TFDIST, "--mode=train"],
        retries=RETRIES,
        retry_delay=datetime.timedelta(seconds=30),
        retry_exponential_backoff=2.0,
        max_retry_delay=datetime.timedelta(minutes=10),
    )
    evaluate = Command(task_id="evaluate", command=[*TFDIST, "--mode=evaluate"])
    gate = Command(task_id="gate", command=[PYTHON, "-c", GATE])
    export = Command(task_id="export", command=[*TFDIST, "--mode=export"])
    validate >> train >> evaluate >> gate >> export
