"""No message shows the user name or the password of an emulator, a proxy or another URL."""

from __future__ import annotations

import pytest

from tfdist.commands import checkpoint as checkpoint
from tfdist.errors import UserError, redacted
from tfdist.storage import gcs_requests

SECRET = "hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{SECRET}@host:1/path",
        f"proxy 'https://{SECRET}@host', and http://a:{SECRET}@b/c and grpc://u:p@{SECRET}@h",
        f"gs://user:{SECRET}@bucket",
    ],
)
def test_credentials_of_urls_are_left_out_of_a_text(text: str) -> None:
    assert SECRET not in redacted(text) and "***@" in redacted(text)
    assert SECRET not in str(UserError(text)) and SECRET not in f"{UserError(text)}"


def test_a_text_without_credentials_is_as_it_was() -> None:
    for text in ("gs://bucket/a@b", "user@host", "http://host/?q=a@b", "tune.search = @search.Random()"):
        assert redacted(text) == text


@pytest.mark.parametrize("port", ["1", "x"])
def test_an_emulator_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: str
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://user:{SECRET}@127.0.0.1:{port}")
    monkeypatch.setattr(gcs_requests, "_REFUSED_PATIENCE_SECONDS", 0.0)
    gcs_requests.forget_client()
    try:
        assert checkpoint.main(["list", "gs://bucket/run"]) == 2
    finally:
        gcs_requests.forget_client()
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said and SECRET not in said and "user" not in said


@pytest.mark.slow
def test_a_place_that_is_no_place_is_named_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(["list", f"https://user:{SECRET}@host/run"]) == 2
    said = capsys.readouterr().err
    assert "https://***@host/run" in said and SECRET not in said
