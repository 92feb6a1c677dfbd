"""Resumable uploads, as https://cloud.google.com/storage/docs/performing-resumable-uploads describes them."""

from __future__ import annotations

import dataclasses
import re
import threading
import uuid
from typing import Any

from gcs.messages import Answer, Request, hashes_of, json_answer
from gcs.objects import ApiError, Buckets, Conditions, StoredObject

CHUNK_BYTES = 256 * 1024  # of which every piece but the last is a multiple


@dataclasses.dataclass
class _Session:
    bucket: str
    name: str
    conditions: Conditions
    metadata: dict[str, Any]
    data: bytearray = dataclasses.field(default_factory=bytearray)
    made: StoredObject | None = None


class Sessions:
    """The uploads under way."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}

    def start(self, request: Request, bucket: str, conditions: Conditions) -> Answer:
        metadata = request.json()
        if "x-upload-content-type" in request.headers:
            metadata.setdefault("contentType", request.headers["x-upload-content-type"])
        name = request.query.get("name") or str(metadata.get("name", ""))
        self._buckets.check(bucket, name, conditions)
        key = uuid.uuid4().hex
        with self._lock:
            self._sessions[key] = _Session(bucket, name, conditions, metadata)
        place = f"{request.address}{request.path}?uploadType=resumable&upload_id={key}"
        return Answer(200, {"Location": place, "X-GUploader-UploadID": key})

    def take(self, request: Request) -> Answer:
        """A piece, or a question how far it is."""
        with self._lock:
            session = self._find(request)
            if session.made is not None:
                return json_answer(session.made.resource())
            begin, total = self._range(request)
            if begin is not None:
                if begin > len(session.data):
                    raise ApiError(400, "badRequest", f"Missing bytes {len(session.data)} to {begin - 1}.")
                session.data += request.body[len(session.data) - begin :]  # what came before is passed over
            if request.whole and total == len(session.data):
                return self._finish(session, request)
            del session.data[len(session.data) // CHUNK_BYTES * CHUNK_BYTES :]
            held = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
            return Answer(308, held)

    def cancel(self, request: Request) -> Answer:
        with self._lock:
            self._find(request)
            del self._sessions[request.query["upload_id"]]
        return Answer(499)

    def _find(self, request: Request) -> _Session:
        session = self._sessions.get(request.query.get("upload_id", ""))
        if session is None:
            raise ApiError(404, "notFound", "Not Found")
        return session

    def _range(self, request: Request) -> tuple[int | None, int | None]:
        """Where the piece begins, None for a question; the size of all, None while it is not known."""
        text = request.headers.get("content-range")
        if text is None:
            return 0, len(request.body) if request.whole else None
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", text.strip())
        if found is None:
            raise ApiError(400, "badRequest", f"Failed to parse Content-Range header: {text}")
        first, last, total = found.groups()
        if first is not None and request.whole and int(last) - int(first) + 1 != len(request.body):
            raise ApiError(400, "badRequest", "Content-Range does not match the length of the body.")
        return (None if first is None else int(first)), (None if total == "*" else int(total))

    def _finish(self, session: _Session, request: Request) -> Answer:
        metadata = {**session.metadata, **hashes_of(request.headers)}
        try:
            session.made = self._buckets.put(
                session.bucket, session.name, bytes(session.data), session.conditions, metadata
            )
        except ApiError:
            del self._sessions[request.query["upload_id"]]
            raise
        session.data = bytearray()
        return json_answer(session.made.resource())
