"""The server answers as Google documents it; asked with raw HTTP, so that no client's habits stand between."""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import google_crc32c
import pytest
from gcs.faults import Fault
from gcs.server import GcsServer


class Client:
    """One connection that is kept alive."""

    def __init__(self, address: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)

    def ask(
        self, method: str, target: str, body: bytes | dict | None = None, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, target, data, names)
        response = self.connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def json(self, method: str, target: str, body: bytes | dict | None = None, **headers: str) -> tuple[int, Any]:
        status, _, content = self.ask(method, target, body, **headers)
        return status, json.loads(content) if content else None

    def put(self, name: str, data: bytes, query: str = "") -> tuple[int, Any]:
        return self.json("POST", f"/upload/storage/v1/b/b/o?uploadType=media&name={name}{query}", data)


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with GcsServer("b") as running:
        yield running


@pytest.fixture
def client(server: GcsServer) -> Client:
    return Client(server.address)


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def test_an_object_has_size_checksums_and_a_generation_that_grows(client: Client) -> None:
    status, first = client.put("a%2Fx%20y", b"hello")
    assert status == 200
    assert (first["name"], first["size"], first["metageneration"]) == ("a/x y", "5", "1")
    assert first["crc32c"] == "mnG7TA=="  # of "hello", as Google's documentation of hashes prints it
    second = client.put("a%2Fx%20y", b"bye")[1]
    assert int(second["generation"]) > int(first["generation"])
    assert client.json("GET", "/storage/v1/b/b/o/a%2Fx%20y")[1]["generation"] == second["generation"]
    assert client.ask("GET", "/download/storage/v1/b/b/o/a%2Fx%20y?alt=media")[2] == b"bye"
    assert client.json("GET", f"/storage/v1/b/b/o/a%2Fx%20y?generation={first['generation']}")[0] == 404


def test_what_is_missing_is_404_with_an_error_body(client: Client) -> None:
    status, error = client.json("GET", "/storage/v1/b/b/o/nothing")
    assert status == error["error"]["code"] == 404
    assert error["error"]["errors"][0] | {"message": ""} == {"domain": "global", "reason": "notFound", "message": ""}
    assert client.json("DELETE", "/storage/v1/b/b/o/nothing")[0] == 404
    assert client.json("POST", "/upload/storage/v1/b/missing/o?uploadType=media&name=x", b"")[0] == 404


def test_preconditions_are_412_and_304_for_what_the_reader_has(client: Client) -> None:
    generation = client.put("x", b"1", "&ifGenerationMatch=0")[1]["generation"]
    status, error = client.put("x", b"2", "&ifGenerationMatch=0")
    assert (status, error["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
    assert client.put("x", b"2", "&ifGenerationMatch=1")[0] == 412
    assert client.put("x", b"2", f"&ifGenerationNotMatch={generation}")[0] == 412
    assert client.json("GET", "/storage/v1/b/b/o/x?ifGenerationMatch=1")[0] == 412
    status, _, body = client.ask("GET", f"/storage/v1/b/b/o/x?alt=media&ifGenerationNotMatch={generation}")
    assert (status, body) == (304, b"")
    assert client.ask("DELETE", "/storage/v1/b/b/o/x?ifGenerationMatch=1")[0] == 412
    assert client.ask("GET", "/storage/v1/b/b/o/x?alt=media")[2] == b"1"
    assert client.ask("DELETE", f"/storage/v1/b/b/o/x?ifGenerationMatch={generation}")[0] == 204
    assert client.put("x", b"3", "&ifGenerationNotMatch=0")[0] == 412  # which asks for a live object


def test_of_racing_creations_one_succeeds(server: GcsServer) -> None:
    def create(n: int) -> int:
        return Client(server.address).put("one", b"%d" % n, "&ifGenerationMatch=0")[0]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(create, range(8))) == [200] + [412] * 7


@pytest.mark.parametrize(
    ("asked", "status", "expected", "content_range"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=0-9", 206, b"0123456789", "bytes 0-9/10"),
        ("nonsense", 200, b"0123456789", None),
    ],
)
def test_ranges(client: Client, asked: str, status: int, expected: bytes | None, content_range: str | None) -> None:
    client.put("x", b"0123456789")
    got, headers, body = client.ask("GET", "/download/storage/v1/b/b/o/x?alt=media", Range=asked)
    assert (got, headers.get("content-range")) == (status, content_range)
    assert expected is None or body == expected
    assert status == 416 or f"crc32c={crc32c(b'0123456789')}" in headers["x-goog-hash"]


def test_a_multipart_upload_carries_metadata(client: Client) -> None:
    def body(crc: str) -> bytes:
        head = json.dumps({"name": "x", "crc32c": crc, "metadata": {"k": "v"}}).encode()
        return (
            b"--sep\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            + head
            + b"\r\n--sep\r\nContent-Type: text/plain\r\n\r\nda\r\nta\r\n--sep--"
        )

    target, kind = "/upload/storage/v1/b/b/o?uploadType=multipart", "multipart/related; boundary=sep"
    made = client.json("POST", target, body(crc32c(b"da\r\nta")), Content_Type=kind)[1]
    assert (made["size"], made["metadata"], made["contentType"]) == ("6", {"k": "v"}, "text/plain")
    assert client.json("POST", target, body(crc32c(b"other")), Content_Type=kind)[0] == 400
    assert client.json("POST", target, b"--sep\r\nhalf", Content_Type=kind)[0] == 400


def test_listing_pages_over_names_and_prefixes_in_order(client: Client) -> None:
    for name in ("a/1", "a/2", "b", "c/d/1", "c/e", "f"):
        client.put(name.replace("/", "%2F"), b"")

    def pages(query: str) -> list[list[str]]:
        found, token = [], ""
        while True:
            page = client.json("GET", f"/storage/v1/b/b/o?{query}&pageToken={token}")[1]
            found.append([item["name"] for item in page.get("items", [])] + page.get("prefixes", []))
            token = page.get("nextPageToken", "")
            if not token:
                return found

    assert pages("") == [["a/1", "a/2", "b", "c/d/1", "c/e", "f"]]
    assert pages("maxResults=4") == [["a/1", "a/2", "b", "c/d/1"], ["c/e", "f"]]
    assert pages("delimiter=%2F&maxResults=1") == [["a/"], ["b"], ["c/"], ["f"]]
    assert pages("prefix=c%2F&delimiter=%2F") == [["c/e", "c/d/"]]
    assert pages("prefix=none") == [[]]
    assert client.json("GET", "/storage/v1/b/missing/o")[0] == 404


def test_a_fault_answers_a_status_as_often_as_it_says(server: GcsServer, client: Client) -> None:
    server.faults.add(Fault("status", method="POST", path="name=x", skip=1, count=2, status=429))
    assert [client.put("x", b"")[0] for _ in range(4)] == [200, 429, 429, 200]
    server.faults.add(Fault("status", probability=0.5, count=None))
    answers = [client.put("y", b"")[0] for _ in range(40)]
    assert set(answers) == {200, 503}
    server.faults.clear()
    assert client.put("y", b"")[0] == 200


def test_a_reset_upload_changes_nothing_and_a_lost_reply_does(server: GcsServer) -> None:
    server.faults.add(Fault("reset_upload"), Fault("lost_reply"))
    for name in ("reset", "lost"):
        with pytest.raises(OSError):
            Client(server.address).put(name, b"x" * 5_000_000)
    assert server.buckets.names("b") == ["lost"]
    assert [asked.status for asked in server.asked] == [None, None]


@pytest.mark.parametrize("kind", ["reset_download", "stall_download"])
def test_a_broken_download_sends_half_of_what_it_promised(server: GcsServer, client: Client, kind: str) -> None:
    client.put("x", b"x" * 1_000_000)
    server.faults.add(Fault(kind, seconds=0.05))
    with pytest.raises((OSError, http.client.IncompleteRead)):
        client.ask("GET", "/storage/v1/b/b/o/x?alt=media")
