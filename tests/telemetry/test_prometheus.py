"""What a run tells is served to Prometheus and as a trace to a collector; the shipped rules fire."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from mistakes import each_is_refused
from monitoring_support import RUN_ID, OtlpReceiver, at, facts_of_a_start, feed, otlp_receiver, run_facts
from prometheus_client.parser import text_string_to_metric_families
from support import REPOSITORY, free_ports, run_command, wait_until

from tfdist.errors import UserError
from tfdist.telemetry.facts import Event
from tfdist.telemetry.registry import METRICS
from tfdist.telemetry.sinks import prometheus
from tfdist.telemetry.sinks.opentelemetry import OpenTelemetry
from tfdist.telemetry.sinks.prometheus import Prometheus

RULES = REPOSITORY / "docs" / "monitoring" / "alerts.yml"
DASHBOARD = REPOSITORY / "docs" / "monitoring" / "dashboard.json"
Labels = tuple[tuple[str, str], ...]


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


def samples_of(text: str) -> dict[tuple[str, Labels], float]:
    """Each sample's value by name and labels, without those that all have."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("job_id") == RUN_ID
            assert sample.labels.pop("worker") in ("0", "1")
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.mark.slow
def test_idle_connections_use_up_neither_threads_nor_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "IDLE_SECONDS", 1.0)
    (port,) = free_ports(1)
    sink = Prometheus(port=port)
    sink.open(run_facts())
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    try:
        time.sleep(0.5)
        assert threading.active_count() <= before + prometheus.MAX_CONNECTIONS
        wait_until(lambda: threading.active_count() <= before, seconds=20)
        assert "tfdist_events_total" in fetched(f"http://127.0.0.1:{port}/metrics")
    finally:
        for each in idle:
            each.close()
        sink.close("done")


def test_each_worker_serves_its_metrics_on_a_port_of_its_own() -> None:
    for port in free_ports(8):
        sinks = [Prometheus(port=port), Prometheus(port=port)]
        sinks[0].open(run_facts(worker=0))
        try:
            sinks[1].open(run_facts(worker=1))
            break
        except UserError:  # another process has the port behind
            sinks[0].close("done")
    feed(sinks[0], [*facts_of_a_start(), *facts_of_a_start(begin=60)])
    found = samples_of(fetched(f"http://127.0.0.1:{port}/metrics"))
    idle = fetched(f"http://127.0.0.1:{port + 1}/metrics")
    for sink in sinks:
        sink.close("done")
    assert found["training_loss", ()] == 0.5 and found["tfdist_loss_is_finite", ()] == 1
    assert found["learning_rate", ()] == 0.01
    assert found["tfdist_compute_share", ()] == 40 / 60 and found["tfdist_training_steps", ()] == 100
    assert found["tfdist_last_step_timestamp_seconds", ()] == at(60).timestamp()  # the second start did none
    assert found["training_duration_seconds_count", ()] == 2 and found["training_duration_seconds_sum", ()] == 120
    assert found["tfdist_checkpoint_interval_seconds", ()] == 60
    assert found["tfdist_metric_value", (("name", "accuracy"), ("split", "eval"))] == 0.75
    assert found["tfdist_time_seconds_total", (("share", "compute"),)] == 40
    assert found["tfdist_events_total", (("event", "straggler"), ("level", "warning"))] == 2
    assert found["checkpoint_size_mb_sum", ()] == 10
    assert found["checkpoint_size_mb_bucket", (("le", "10.0"),)] == 2
    assert found["cost_usd_total", ()] == 2 * 60 * 30.0 / 3600  # of two devices
    assert {name for name, _ in samples_of(idle)} == {"tfdist_events_total", "tfdist_events_created"}  # all 0
    with pytest.raises(OSError):
        fetched(f"http://127.0.0.1:{port}/metrics")


def test_a_text_file_goes_with_the_run_unless_that_fails(tmp_path: Path) -> None:
    sink = Prometheus(textfile_directory=str(tmp_path))
    sink.open(run_facts(worker=1))
    feed(sink, facts_of_a_start())
    assert [path.name for path in tmp_path.iterdir()] == [f"tfdist-{RUN_ID}-1.prom"]
    file = tmp_path / f"tfdist-{RUN_ID}-1.prom"
    assert samples_of(file.read_text())["training_loss", ()] == 0.5
    sink.event(Event(name="training_diverged", level="error"))
    sink.close("failed")
    assert samples_of(file.read_text())["tfdist_loss_is_finite", ()] == 0  # for alerts
    sink.close("done")
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_one_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use.*worker k listens on port"):
            Prometheus(port=port).open(run_facts())


test_a_wrong_setting_is_told_at_once = each_is_refused(
    lambda sink, wrong: sink(**wrong),
    (Prometheus, {}, "neither a port nor a textfile_directory"),
    (Prometheus, {"port": 70_000}, "from 1 to 65535. Received: 70000"),
    (Prometheus, {"textfile_directory": "/nowhere/at/all"}, "a directory that exists"),
    (OpenTelemetry, {"endpoint": "localhost:4318"}, "must be the URL"),
    (OpenTelemetry, {"endpoint": 4318}, "must be the URL"),
)


def test_rules_and_dashboard_ask_for_metrics_that_exist() -> None:
    names = {metric.exposed_name for metric in METRICS.values()}
    names |= {f"{name}_{suffix}" for name in names for suffix in ("sum", "count", "total")}
    for text in (RULES.read_text(), DASHBOARD.read_text()):
        asked = set(re.findall(r"\b(?:tfdist_[a-z_]+|\w+(?=\{job_id))", text))
        assert asked
        assert asked <= names


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool (Debian: apt-get install prometheus)")
def test_the_rules_fire_when_they_should_and_the_dashboard_asks_in_prometheus_language(tmp_path: Path) -> None:
    run_command(["promtool", "test", "rules", Path(__file__).parent / "alerts.test.yml"]).check()
    asked = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(dashboard_queries())]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": asked}]}))  # is YAML
    run_command(["promtool", "check", "rules", RULES, tmp_path / "rules.yml"]).check()


def dashboard_queries() -> list[str]:
    """What the dashboard asks, with its variables as Grafana fills them in."""
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    filled = {"$job_id": RUN_ID, "$worker": ".*", "$__rate_interval": "1m", "$__interval": "1m"}
    return [re.sub(r"\$\w+", lambda found: filled[found[0]], query) for query in queries]


# Traces


def receive_traces(status: str) -> OtlpReceiver:
    """What a collector receives of a run that ends with a status."""
    with otlp_receiver() as receiver:
        sink = OpenTelemetry(endpoint=receiver.url)
        sink.open(run_facts())
        feed(sink, facts_of_a_start())
        sink.close(status)
    return receiver


def test_phases_epochs_checkpoints_and_events_are_spans() -> None:
    receiver = receive_traces("failed")
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
    headers = receive_traces("done").headers
    assert {each["authorization"] for each in headers} == ({"Bearer abc"} if rate else set())
