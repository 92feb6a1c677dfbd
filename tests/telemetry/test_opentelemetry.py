"""A collector receives one trace of a run, over its starts and workers; a bad one holds up little."""

from __future__ import annotations

from typing import Any

import pytest
from monitoring_support import at, facts_of_a_start, feed, otlp_receiver, run_facts

from tfdist.errors import UserError
from tfdist.telemetry.sinks.opentelemetry import OpenTelemetry


def test_phases_epochs_checkpoints_and_events_are_spans() -> None:
    with otlp_receiver() as receiver:
        sink = OpenTelemetry(endpoint=receiver.url)
        sink.open(run_facts())
        feed(sink, facts_of_a_start())
        sink.close("failed")
    spans = {span["name"]: span for span in receiver.spans}
    lasted = {
        name: (span["begin"] - at(0).timestamp(), span["seconds"])
        for name, span in spans.items()
        if name not in ("start", "train", "epoch")
    }
    assert lasted == {
        "import": (0, 4),
        "build": (4, 6),
        "checkpoint_saved": (22, 3),
        "evaluate": (26, 4),
        "straggler": (31, 0),
        "run_failed": (32, 0),
    }
    epochs = [span for span in receiver.spans if span["name"] == "epoch"]
    assert [(span["tfdist.epoch"], span["begin"] - at(0).timestamp(), span["seconds"]) for span in epochs] == [
        (1, 10, 10),
        (2, 20, 10),
    ]
    assert spans["checkpoint_saved"]["tfdist.num_bytes"] == 5_000_000
    assert spans["straggler"]["tfdist.message"] == "worker 1 holds up the others"
    assert spans["straggler"]["tfdist.by_worker"] == "[0.1, 0.4]"
    assert {name for name, span in spans.items() if span["failed"]} == {"run_failed", "train"}
    assert spans["run_failed"]["said"] == "out of memory"
    assert spans["train"]["tfdist.status"] == "failed"
    assert spans["train"]["begin"] == at(0).timestamp()  # with what came before the sink
    assert spans["start"]["tfdist.strategy"] == "multi_worker"


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_token_comes_from_the_environment_and_a_run_that_is_not_sampled_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(rate))
    with otlp_receiver() as receiver:
        sink = OpenTelemetry(endpoint=receiver.url)
        sink.open(run_facts())
        feed(sink, facts_of_a_start())
        sink.close("done")
    assert {headers["authorization"] for headers in receiver.headers} == ({"Bearer abc"} if rate else set())


@pytest.mark.parametrize("endpoint", ["localhost:4318", 4318])
def test_a_wrong_endpoint_is_refused_at_once(endpoint: Any) -> None:
    with pytest.raises(UserError, match="must be the URL"):
        OpenTelemetry(endpoint=endpoint)
