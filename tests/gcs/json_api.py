"""The JSON API, as https://cloud.google.com/storage/docs/json_api/v1 describes it, as far as it is needed here."""

from __future__ import annotations

import base64
import re
from typing import Any
from urllib.parse import unquote

from gcs.messages import Answer, Request, json_answer
from gcs.objects import ApiError, Buckets, Conditions, StoredObject

MOST_LISTED = 1000  # names a page, which is also what it gives if not asked for less
_OBJECT = r"/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)"


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
        after = base64.urlsafe_b64decode(query["pageToken"]).decode() if query.get("pageToken") else None
        entries: dict[str, bool] = {}  # name or prefix, and whether it is a prefix; in the order of names
        for name in self._buckets.names(bucket):
            if not name.startswith(prefix):
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            entry = name if cut < 0 else name[: cut + len(delimiter)]
            if after is None or entry > after:
                entries.setdefault(entry, cut >= 0)
        page = list(entries)[:most]
        content: dict[str, Any] = {"kind": "storage#objects"}
        items = [self._resource_of(bucket, name) for name in page if not entries[name]]
        prefixes = [name for name in page if entries[name]]
        content |= {"items": [i for i in items if i]} if items else {}
        content |= {"prefixes": prefixes} if prefixes else {}
        if len(entries) > len(page):
            content["nextPageToken"] = base64.urlsafe_b64encode(page[-1].encode()).decode()
        return json_answer(content)

    def _resource_of(self, bucket: str, name: str) -> dict[str, Any] | None:
        try:
            return self._buckets.get(bucket, name, Conditions()).resource()
        except ApiError:  # deleted meanwhile
            return None

    def _get(self, request: Request, bucket: str, name: str) -> Answer:
        found = self._buckets.get(bucket, name, Conditions.of(request.query), _generation(request))
        if request.query.get("alt") == "media":
            return media(found, request.headers.get("range"))
        return json_answer(found.resource(), ETag=found.etag)

    def _delete(self, request: Request, bucket: str, name: str) -> Answer:
        self._buckets.delete(bucket, name, Conditions.of(request.query), _generation(request))
        return Answer(204)

    def _upload(self, request: Request, bucket: str) -> Answer:
        kind = request.query.get("uploadType")
        if kind == "media":
            metadata, data = {}, request.body
        elif kind == "multipart":
            metadata, data = split_multipart(request)
        else:
            raise ApiError(400, "invalid", f"Invalid value for uploadType: {kind}")
        name = request.query.get("name") or str(metadata.get("name", ""))
        made = self._buckets.put(bucket, name, data, Conditions.of(request.query), metadata)
        return json_answer(made.resource(), ETag=made.etag)


def media(found: StoredObject, asked: str | None) -> Answer:
    """The data or a range of it; see https://www.rfc-editor.org/rfc/rfc9110#name-range-requests."""
    size = len(found.data)
    headers = {
        "Content-Type": found.metadata.get("contentType", "application/octet-stream"),
        "Accept-Ranges": "bytes",
        "ETag": found.etag,
        "X-Goog-Generation": str(found.generation),
        "X-Goog-Metageneration": "1",
        "X-Goog-Stored-Content-Length": str(size),
        "X-Goog-Hash": f"crc32c={found.crc32c}",
    }
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", (asked or "").strip())
    if match is None or match.groups() == ("", ""):  # what cannot be understood is passed over
        return Answer(200, headers, found.data)
    first, last = match.groups()
    begin = int(first) if first else max(0, size - int(last))
    end = min(int(last), size - 1) if first and last else size - 1
    if begin >= size or begin > end:
        text = b"Request range not satisfiable"
        return Answer(416, {"Content-Type": "text/html; charset=UTF-8", "Content-Range": f"bytes */{size}"}, text)
    return Answer(206, headers | {"Content-Range": f"bytes {begin}-{end}/{size}"}, found.data[begin : end + 1])


def split_multipart(request: Request) -> tuple[dict[str, Any], bytes]:
    """Metadata and data of an uploadType=multipart; see https://www.rfc-editor.org/rfc/rfc2387."""
    found = re.search(r'boundary="?([^";]+)"?', request.headers.get("content-type", ""))
    if found is None:
        raise ApiError(400, "badContent", "Multipart content-type must have a boundary.")
    marker = b"--" + found.group(1).strip("'").encode()
    body, between, last = request.body, b"\r\n" + marker + b"\r\n", b"\r\n" + marker + b"--"
    begin = body.find(b"\r\n\r\n") + 4
    middle = body.find(between, begin)
    data_at = body.find(b"\r\n\r\n", middle) + 4
    end = body.rfind(last)  # by places, as to split would copy what may be large
    if not body.startswith(marker) or not 4 <= begin <= middle < data_at <= end:
        raise ApiError(400, "badContent", "Multipart must have two parts: metadata and media.")
    text, head, data = body[begin:middle], body[middle:data_at], body[data_at:end]
    metadata = Request("", "", {}, {}, text).json()
    typed = re.search(rb"(?i)content-type:\s*([^\r\n]+)", head)
    if typed and "contentType" not in metadata:
        metadata["contentType"] = typed.group(1).decode()
    return metadata, data


def _generation(request: Request) -> int | None:
    return int(request.query["generation"]) if "generation" in request.query else None
