"""The server answers as Google documents it where tfdist relies on it; asked with raw HTTP, without a client."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from gcs.faults import Fault
from gcs.server import GcsServer

HELLO = "mnG7TA=="  # the CRC-32C of "hello", as Google's documentation of hashes prints it
UPLOAD = "/upload/storage/v1/b/b/o?uploadType=multipart"


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with GcsServer("b") as running:
        yield running


def ask(server: GcsServer, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, dict, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=20)
    connection.request(method, target, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()


def put(server: GcsServer, data: bytes, condition: str = "", crc32c: str | None = None) -> tuple[int, dict]:
    head = json.dumps({"name": "a/x y", "crc32c": crc32c, "metadata": {"k": "v"}}).encode()
    body = b"--sep\r\nContent-Type: application/json\r\n\r\n%b\r\n--sep\r\nContent-Type: x/y\r\n\r\n%b\r\n--sep--"
    content_type = "multipart/related; boundary=sep"
    status, _, answer = ask(server, "POST", UPLOAD + condition, body % (head, data), Content_Type=content_type)
    return status, json.loads(answer)


def test_objects_have_checksums_and_generations_which_preconditions_compare(server: GcsServer) -> None:
    assert put(server, b"hello", crc32c="AAAAAA==")[0] == 400
    status, first = put(server, b"hello", "&ifGenerationMatch=0", HELLO)
    assert (status, first["name"], first["size"], first["crc32c"]) == (200, "a/x y", "5", HELLO)
    assert first["metadata"] == {"k": "v"}
    assert put(server, b"", "&ifGenerationMatch=0")[0] == put(server, b"", "&ifGenerationMatch=1")[0] == 412
    second = put(server, b"da\r\nta", f"&ifGenerationMatch={first['generation']}")[1]
    assert int(second["generation"]) > int(first["generation"])
    assert ask(server, "GET", "/download/storage/v1/b/b/o/a%2Fx%20y?alt=media")[2] == b"da\r\nta"
    assert ask(server, "GET", f"/storage/v1/b/b/o/a%2Fx%20y?generation={first['generation']}")[0] == 404
    assert ask(server, "DELETE", "/storage/v1/b/b/o/a%2Fx%20y?ifGenerationMatch=1")[0] == 412
    assert ask(server, "DELETE", "/storage/v1/b/b/o/a%2Fx%20y")[0] == 204
    status, _, error = ask(server, "DELETE", "/storage/v1/b/b/o/a%2Fx%20y")
    assert status == json.loads(error)["error"]["code"] == 404
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda n: put(server, b"%d" % n, "&ifGenerationMatch=0")[0], range(8))
    assert sorted(made) == [200] + [412] * 7


@pytest.mark.parametrize(
    ("asked", "status", "expected", "content_range"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-20", 416, None, "bytes */10"),
    ],
)
def test_ranges(server: GcsServer, asked: str, status: int, expected: bytes | None, content_range: str) -> None:
    server.buckets.put("b", "x", b"0123456789")
    got, headers, body = ask(server, "GET", "/download/storage/v1/b/b/o/x?alt=media", Range=asked)
    assert (got, headers["content-range"], expected or body) == (status, content_range, body)


def test_listing_pages_over_names_and_prefixes_in_order(server: GcsServer) -> None:
    for name in ("a/1", "a/2", "b", "c/d/1", "c/e", "f"):
        server.buckets.put("b", name, b"")

    def pages(query: str) -> list[list[str]]:
        found, token = [], ""
        while True:
            page = json.loads(ask(server, "GET", f"/storage/v1/b/b/o?{query}&pageToken={token}")[2])
            found.append([item["name"] for item in page.get("items", [])] + page.get("prefixes", []))
            token = page.get("nextPageToken", "")
            if not token:
                return found

    assert pages("maxResults=4") == [["a/1", "a/2", "b", "c/d/1"], ["c/e", "f"]]
    assert pages("delimiter=%2F&maxResults=1") == [["a/"], ["b"], ["c/"], ["f"]]
    assert pages("prefix=c%2F&delimiter=%2F") == [["c/e", "c/d/"]]
    assert pages("prefix=none") == [[]]
    assert ask(server, "GET", "/storage/v1/b/missing/o")[0] == 404


def test_a_fault_comes_as_often_as_it_says_and_a_lost_reply_does_what_was_asked(server: GcsServer) -> None:
    server.faults.add(Fault("status", method="POST", skip=1, count=2, status=429))
    assert [ask(server, "POST", UPLOAD)[0] for _ in range(4)] == [400, 429, 429, 400]
    server.faults.add(Fault("reset_upload"), Fault("lost_reply"), Fault("reset_download"))
    for expected in ([], ["a/x y"]):
        with pytest.raises(OSError):
            put(server, b"x" * 5_000_000)
        assert server.buckets.names("b") == expected
    with pytest.raises((OSError, http.client.IncompleteRead)):
        ask(server, "GET", "/storage/v1/b/b/o/a%2Fx%20y?alt=media")
