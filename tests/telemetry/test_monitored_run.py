"""A run of two workers, killed once, as a collector of traces, its structured log, its samples and its page show it."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from crashes.runs import environment
from monitoring_support import otlp_receiver
from report.pages import Page
from support import REPOSITORY, run_python

from tfdist.report.run_data import read_run
from tfdist.report.write_pages import write_run_page

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Monitored:
    """The directory of the run, when it was killed, the collector's spans, and all workers' lines."""

    directory: Path
    killed_at: float
    spans: list[dict[str, Any]]
    lines: list[dict[str, Any]]

    @property
    def run_id(self) -> str:
        return (self.directory / "telemetry" / "run_id").read_text().strip()


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Monitored:
    directory = tmp_path_factory.mktemp("monitored")
    faults, run_dir = directory / "faults", directory / "run"
    faults.mkdir()
    (faults / "faults.json").write_text(json.dumps([("killed", 1, 12)]))
    with otlp_receiver() as receiver:
        params = [
            "from tfdist.telemetry.sinks import opentelemetry",
            "train.sinks = [@opentelemetry.OpenTelemetry()]",
            f"opentelemetry.OpenTelemetry.endpoint = {receiver.url!r}",
            *("train.epochs = 3", "train.log_gradient_norm = True"),
        ]
        finished = run_python(
            [
                *("-m", "tfdist.launch", "--workers=2", "--max_restarts=1", "--backoff_seconds=0.1", "--"),
                *("--gin_file=tests/launch/faulty.gin", "--gin_file=configs/strategies/multi_worker.gin"),
                *(f"--gin_param={param}" for param in params),
                *(f"--run_dir={run_dir}", "--log=json"),
            ],
            env=environment() | {"TFDIST_TEST_FAULTS": str(faults)},
            cwd=REPOSITORY,
        ).check()
    lines = [line.partition("] ")[2] for line in finished.stdout.splitlines() if line.startswith("[worker ")]
    return Monitored(run_dir, (faults / "taken0").stat().st_mtime, receiver.spans, list(map(json.loads, lines)))


def test_all_starts_and_workers_are_one_trace(monitored: Monitored) -> None:
    spans = monitored.spans
    assert {span["trace"] for span in spans} == {monitored.run_id}

    def of(start: int, worker: int) -> list[str]:
        return [span["name"] for span in spans if (span["tfdist.start"], span["tfdist.worker"]) == (start, worker)]

    assert len({span["id"] for span in spans}) == len(spans)  # though training seeds all workers alike
    starts = {span["id"] for span in spans if span["name"] == "start"}
    assert len(starts) == 4
    assert {span["parent"] for span in spans if span["name"] != "start"} == starts
    assert {"import", "connect"} <= set(of(0, 1))  # of the killed one, without its last seconds
    assert {"import", "connect", "data", "build"} <= set(of(0, 0))  # it is ended, in a collective, a second later
    for start, worker in ((1, 0), (1, 1)):
        assert {"import", "connect", "data", "build", "evaluate", "checkpoint", "train"} <= set(of(start, worker))
    assert {"restore", "resumed", "epoch", "checkpoint_saved"} <= set(of(1, 0))
    ends = {span["tfdist.start"]: span["tfdist.status"] for span in spans if span["name"] == "train"}
    assert ends in ({0: "failed", 1: "done"}, {1: "done"})


def test_all_starts_and_workers_have_one_id_in_the_structured_log(monitored: Monitored) -> None:
    assert {line["job_id"] for line in monitored.lines} - {None} == {monitored.run_id}
    assert {line["worker"] for line in monitored.lines if line["job_id"] is not None} == {0, 1}
    ended = [line for line in monitored.lines if line["event"] == "epoch_ended"]
    assert [line["epoch"] for line in ended] == [1, 2, 3] and all(line["loss"] > 0 for line in ended)


@pytest.mark.parametrize("worker", [0, 1])
def test_the_samples_of_a_process_account_for_its_whole_life(monitored: Monitored, worker: int) -> None:
    log = monitored.directory / "telemetry" / f"worker-{worker}.jsonl"
    samples = list(map(json.loads, log.read_text().splitlines()))
    assert sorted({sample["start"] for sample in samples}) == [0, 1]
    samples = [sample for sample in samples if sample["start"] == 1]
    assert samples[-1]["step"] == 24
    times = [datetime.datetime.fromisoformat(sample["time"]).timestamp() for sample in samples]
    totals = [sum(sample["seconds"].values()) for sample in samples]
    assert totals[-1] - totals[0] == pytest.approx(times[-1] - times[0], abs=0.5)
    assert monitored.killed_at < times[0] - totals[0]  # not before the process
    shares = ("import", "connect", "data", "build", "compute", "evaluate", "finish")
    assert all(samples[-1]["seconds"][share] > 0 for share in shares)
    assert samples[-1]["values"]["host_memory_bytes"] > 1e8


def test_the_page_has_both_starts_metrics_norms_and_settings(monitored: Monitored) -> None:
    page, run = Page(write_run_page(str(monitored.directory))), read_run(str(monitored.directory))
    assert len(run.starts) == 2
    assert {"Curves", "What happened", "Configuration", "Environment"} <= set(page.sections)
    result = json.loads((monitored.directory / "result.json").read_text())
    assert f"<dt>status</dt><dd>done</dd></div><div><dt>steps</dt><dd>{result['steps']:,}" in page.text
    assert run.metrics["val_loss"] == result["eval_metrics"]["loss"]
    for shown in ("norm of the gradient, before clipping", "learning rate", "keras.optimizers.Adam.beta_1", "resumed"):
        assert shown in page.text
    assert run.stated["train.log_gradient_norm"] == "True" and run.defaults["train.precision"] == "'float32'"
