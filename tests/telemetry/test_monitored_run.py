"""A run as it is, watched by an OpenTelemetry collector."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crashes.runs import environment
from monitoring_support import otlp_receiver
from support import REPOSITORY, run_python

pytestmark = pytest.mark.slow


def test_a_launched_run_that_is_killed_and_restarted_is_one_trace_of_both_workers(tmp_path: Path) -> None:
    faults, run_dir = tmp_path / "faults", tmp_path / "run"
    faults.mkdir()
    (faults / "faults.json").write_text(json.dumps([("killed", 1, 12)]))
    with otlp_receiver() as receiver:
        params = [
            "from tfdist.telemetry.sinks import opentelemetry",
            "train.sinks = [@opentelemetry.OpenTelemetry()]",
            f"opentelemetry.OpenTelemetry.endpoint = {receiver.url!r}",
            "train.epochs = 3",
        ]
        run_python(
            [
                *("-m", "tfdist.launch", "--workers=2", "--max_restarts=1", "--backoff_seconds=0.1", "--"),
                *("--gin_file=tests/launch/faulty.gin", "--gin_file=configs/strategies/multi_worker.gin"),
                *(f"--gin_param={param}" for param in params),
                f"--run_dir={run_dir}",
            ],
            env=environment() | {"TFDIST_TEST_FAULTS": str(faults)},
            cwd=REPOSITORY,
        ).check()
    spans = receiver.spans
    assert {span["trace"] for span in spans} == {(run_dir / "telemetry" / "run_id").read_text().strip()}

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
