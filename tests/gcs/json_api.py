"""The JSON API, as https://cloud.google.com/storage/docs/json_api/v1 describes it, as far as it is needed here."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from gcs.objects import ApiError, Buckets

MOST_LISTED = 1000  # names a page, which is also what it gives if not asked for less
_OBJECT = r"/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)"


@dataclasses.dataclass(frozen=True)
class Request:
    """One request, free of sockets.

    Attributes:
      method: GET and the like.
      path: as it was sent, still quoted, without the query.
      query: by name.
      headers: by lower-case name.
      body: what arrived of it.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def number(self, name: str) -> int | None:
        """A number in the query."""
        return int(self.query[name]) if name in self.query else None


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer; Content-Length is added when it is sent."""

    status: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""


def json_answer(content: Mapping[str, Any], status: int = 200) -> Answer:
    return Answer(status, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(content).encode())


def json_error(error: ApiError) -> Answer:
    """As https://cloud.google.com/storage/docs/json_api/v1/status-codes has it."""
    detail = {"message": error.message, "domain": "global", "reason": error.reason}
    return json_answer({"error": {"code": error.status, "message": error.message, "errors": [detail]}}, error.status)


class JsonApi:
    """Answers the requests below /storage, /upload/storage and /download/storage."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._routes = [
            (method, re.compile(pattern), handler)
            for method, pattern, handler in (
                ("GET", r"/storage/v1/b/(?P<bucket>[^/]+)/o", self._list),
                ("GET", rf"(/download)?{_OBJECT}", self._get),
                ("DELETE", _OBJECT, self._delete),
                ("POST", r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o", self._upload),
            )
        ]

    def answer(self, request: Request) -> Answer:
        """Raises ApiError."""
        for method, pattern, handler in self._routes:
            found = pattern.fullmatch(request.path)
            if found and method == request.method:
                return handler(request, **{k: unquote(v) for k, v in found.groupdict().items()})
        raise ApiError(404, "notFound", "Not Found")

    def _list(self, request: Request, bucket: str) -> Answer:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most = min(int(query.get("maxResults", MOST_LISTED)), MOST_LISTED)
        after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        entries: dict[str, bool] = {}  # name or prefix, and whether it is a prefix; in the order of names
        for name in self._buckets.names(bucket):
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            entry = name if cut < 0 else name[: cut + len(delimiter)]
            if name.startswith(prefix) and entry > after:
                entries.setdefault(entry, cut >= 0)
        page = list(entries)[:most]
        content: dict[str, Any] = {
            "items": [{"name": name} for name in page if not entries[name]],
            "prefixes": [name for name in page if entries[name]],
        }
        if len(entries) > len(page):
            content["nextPageToken"] = base64.urlsafe_b64encode(page[-1].encode()).decode()
        return json_answer(content)

    def _get(self, request: Request, bucket: str, name: str) -> Answer:
        found = self._buckets.get(bucket, name, request.number("generation"))
        if request.query.get("alt") != "media":
            return json_answer(found.resource())
        headers = {"X-Goog-Generation": str(found.generation), "X-Goog-Hash": f"crc32c={found.crc32c}"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if asked is None:
            return Answer(200, headers, found.data)
        begin, end, size = int(asked[1]), int(asked[2]) + 1, len(found.data)
        if begin >= size:
            return Answer(416, {"Content-Range": f"bytes */{size}"}, b"Request range not satisfiable")
        data = found.data[begin:end]
        return Answer(206, headers | {"Content-Range": f"bytes {begin}-{begin + len(data) - 1}/{size}"}, data)

    def _delete(self, request: Request, bucket: str, name: str) -> Answer:
        self._buckets.delete(bucket, name, request.number("ifGenerationMatch"))
        return Answer(204)

    def _upload(self, request: Request, bucket: str) -> Answer:
        metadata, data = split_multipart(request)
        made = self._buckets.put(
            bucket,
            str(metadata.get("name", "")),
            data,
            crc32c=metadata.get("crc32c"),
            metadata=metadata.get("metadata"),
            generation_match=request.number("ifGenerationMatch"),
        )
        return json_answer(made.resource())


def split_multipart(request: Request) -> tuple[dict[str, Any], bytes]:
    """Metadata and data of an uploadType=multipart; see https://www.rfc-editor.org/rfc/rfc2387."""
    found = re.search(r'boundary="?([^";]+)"?', request.headers.get("content-type", ""))
    marker = b"--" + (found[1].strip("'").encode() if found else b"")
    body = request.body
    begin = body.find(b"\r\n\r\n") + 4
    middle = body.find(b"\r\n" + marker + b"\r\n", begin)
    data_at = body.find(b"\r\n\r\n", middle) + 4
    end = body.rfind(b"\r\n" + marker + b"--")  # by places, as to split would copy what may be large
    if found is None or not body.startswith(marker) or not 4 <= begin <= middle < data_at <= end:
        raise ApiError(400, "badContent", "A multipart body has a boundary and two parts: metadata and media.")
    return json.loads(body[begin:middle]), body[data_at:end]
