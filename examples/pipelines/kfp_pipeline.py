"""A pipeline of Kubeflow Pipelines that validates, trains, evaluates, compares a metric with a bound and exports.

Change what stands in capitals below, and `configure`; `python kfp_pipeline.py` compiles it to NAME.yaml. It needs kfp
2.17 or newer, best in an environment of its own. Each start takes `run_dir` as a parameter, in a bucket, as a step's
disk is lost with its pod; the pods' service account opens it.

To prepare data, add a component of its own and `validated.after(prepare())`.
"""

from kfp import compiler, dsl

NAME = "digits"
IMAGE = "europe-docker.pkg.dev/project/images/tfdist:0.1.0"  # with a tag or digest, and your gin files in it
PYTHON = "python"
TFDIST = [PYTHON, "-m", "tfdist.main", "--gin_file=configs/experiments/digits.gin"]
READ = [PYTHON, "-c", "import sys; from tfdist.storage import files; print(files.read(sys.argv[1]).decode())"]
RUN_DIR = "gs://bucket/digits"  # unless a start names another
METRIC, AT_LEAST = "accuracy", 0.95
RETRIES = 3  # of the training, which resumes from its newest checkpoint


def configure(task):
    """Sets what a step asks of its machine. KFP's cache does not know of its results, in the run directory."""
    task.set_caching_options(False)
    task.set_cpu_limit("8").set_memory_limit("32Gi")
    task.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)
    return task


@dsl.component(base_image=IMAGE)
def validate(command: list, run_dir: str):
    import subprocess

    subprocess.run([*command, f"--run_dir={run_dir}"], check=True)


@dsl.component(base_image=IMAGE)
def train(
    command: list, read: list, run_dir: str, model: dsl.Output[dsl.Model], metrics: dsl.Output[dsl.Metrics]
) -> int:
    """Fails only where a retry can help, as KFP repeats whatever fails. A status that is final is the output."""
    import json
    import subprocess

    status = subprocess.run([*command, f"--run_dir={run_dir}"]).returncode
    if status in (2, 3):  # a mistake of the user's, or the training diverged: again would be the same
        return status
    if status:
        raise RuntimeError(f"the training ended with status {status}, and can resume from its newest checkpoint")
    result = json.loads(subprocess.check_output([*read, f"{run_dir}/result.json"]))
    for name, value in (result["eval_metrics"] or result["train_metrics"]).items():
        if value is not None:
            metrics.log_metric(name, value)
    model.uri = f"{run_dir}/export/model.keras"
    model.metadata["run_dir"] = run_dir
    return 0


@dsl.component(base_image=IMAGE)
def evaluate(
    status: int, command: list, read: list, run_dir: str, model: dsl.Input[dsl.Model], metrics: dsl.Output[dsl.Metrics]
):
    """Evaluates the trained model and logs its metrics."""
    import json
    import subprocess

    if status:
        raise RuntimeError(f"the training ended with status {status}; its log has the message")
    subprocess.run([*command, f"--run_dir={run_dir}"], check=True)
    metrics.metadata.update(run_dir=run_dir, model=model.uri)
    evaluation = json.loads(subprocess.check_output([*read, f"{run_dir}/evaluation.json"]))
    for name, value in evaluation.items():
        if isinstance(value, int | float):
            metrics.log_metric(name, value)


@dsl.component(base_image=IMAGE)
def gate(metric: str, at_least: float, metrics: dsl.Input[dsl.Metrics]):
    value = metrics.metadata[metric]
    if not value >= at_least:
        raise RuntimeError(f"{metric} is {value}, and not at least {at_least}: nothing is exported")


@dsl.component(base_image=IMAGE)
def export(command: list, run_dir: str, model: dsl.Input[dsl.Model], exported: dsl.Output[dsl.Model]):
    import os
    import subprocess

    subprocess.run([*command, f"--run_dir={run_dir}"], check=True)
    exported.uri = os.path.dirname(model.uri)
    exported.metadata["run_dir"] = run_dir


@dsl.pipeline(name=NAME)
def pipeline(run_dir: str = RUN_DIR):
    """Validates, trains, evaluates, and exports what passes the gate."""
    validated = configure(validate(command=[*TFDIST, "--mode=validate"], run_dir=run_dir))
    trained = configure(train(command=[*TFDIST, "--mode=train"], read=READ, run_dir=run_dir)).after(validated)
    trained.set_retry(RETRIES, backoff_duration="30s", backoff_factor=2, backoff_max_duration="600s")
    evaluated = configure(
        evaluate(
            status=trained.outputs["Output"],
            command=[*TFDIST, "--mode=evaluate"],
            read=READ,
            run_dir=run_dir,
            model=trained.outputs["model"],
        )
    )
    passed = configure(gate(metric=METRIC, at_least=AT_LEAST, metrics=evaluated.outputs["metrics"]))
    model = trained.outputs["model"]
    configure(export(command=[*TFDIST, "--mode=export"], run_dir=run_dir, model=model)).after(passed)


if __name__ == "__main__":
    compiler.Compiler().compile(pipeline, f"{NAME}.yaml")
