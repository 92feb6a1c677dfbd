"""No message shows the user name or the password of an emulator, a proxy or another URL."""

from __future__ import annotations

import io
import pathlib

import pytest
from monitoring_support import tracked_facts

from tfdist.commands import verbs
from tfdist.errors import EXIT_STORE_UNAVAILABLE, EXIT_USER_ERROR, UserError, redact
from tfdist.storage import gcs_requests
from tfdist.strategies.one_device import OneDevice
from tfdist.telemetry.console.console import PlainConsole
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.facts import Event
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.telemetry.sinks.sink import Sink, SinkDispatcher
from tfdist.training.run.request import Request
from tfdist.training.run.run import run_facts as facts_of_run
from tfdist.training.run.train_settings import TelemetrySettings

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"http://user:{SECRET}@host:1/path", "http://***@host:1/path"),
        (f"proxy 'https://{SECRET}@host', and grpc://u:p@{SECRET}@h", "proxy 'https://***@host', and grpc://***@h"),
        (f"gs://user:{SECRET}@bucket", "gs://***@bucket"),
        *(
            (text, text)
            for text in ("gs://bucket/a@b", "user@host", "http://host/?q=a@b", "tune.search = @search.Random()")
        ),
    ],
)
def test_credentials_of_urls_are_left_out_of_a_text_and_nothing_else(text: str, redacted: str) -> None:
    assert redact(text) == str(UserError(text)) == redacted


@pytest.mark.parametrize("port", ["1", "x"])
def test_an_emulator_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://user:{SECRET}@127.0.0.1:{port}")
    monkeypatch.setattr(gcs_requests, "_REFUSED_PATIENCE_SECONDS", 0.1)
    gcs_requests.forget_client()
    try:
        ended = verbs.run(["checkpoint", "list", "gs://bucket/run"])
    finally:
        gcs_requests.forget_client()
    assert ended == (EXIT_STORE_UNAVAILABLE if port == "1" else EXIT_USER_ERROR)
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said and SECRET not in said and "user" not in said


def test_what_a_sink_raises_is_told_without_its_password(tmp_path: pathlib.Path) -> None:
    class Tracker(Sink):
        def event(self, event: Event) -> None:
            raise ConnectionError(f"no answer of http://user:{SECRET}@tracker/api")

    taken: list[Event] = []
    stdout, stderr = io.StringIO(), io.StringIO()
    console = PlainConsole(stdout, stderr)
    log = EventLog(RunDirectory(str(tmp_path)), worker=0, console=console, dispatch=taken.append)
    stream = SinkDispatcher(
        [Tracker()],
        tracked_facts(tmp_path),
        warn=lambda text: log.warning("sink_dropped", message=text, why=text),
    )
    stream.dispatch(Event(name="training_started", level="info", worker=0, step=None, message=None, details={}))
    stream.close()
    log.close()
    assert "http://***@tracker/api" in stderr.getvalue()
    told = stderr.getvalue() + (tmp_path / "events.jsonl").read_text() + repr(taken)
    assert "sink_dropped" in told and SECRET not in told


@pytest.mark.slow
def test_sinks_learn_settings_without_their_passwords(tmp_path: pathlib.Path) -> None:
    settings = {"mlflow.MLflow.tracking_uri": f"'http://user:{SECRET}@tracker'", "train.epochs": "3"}
    request = Request(str(tmp_path), config_text=lambda: str(settings), settings=lambda: settings)
    strategy = OneDevice()
    strategy.connect()
    found = facts_of_run(request, strategy, TelemetrySettings(), mode="train", start=1, warn=print)
    assert found.settings == {"mlflow.MLflow.tracking_uri": "'http://***@tracker'", "train.epochs": "3"}
    assert "***@tracker" in found.config_text and SECRET not in found.config_text
