"""Requests and answers as the APIs see them, free of sockets; how errors are said in JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gcs.objects import ApiError


@dataclasses.dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
      method: GET and the like.
      path: as it was sent, still quoted, without the query.
      query: by name; the last of several values counts.
      headers: by lower-case name.
      body: what arrived of it.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; empty where there is none."""
        try:
            content = json.loads(self.body) if self.body.strip() else {}
        except ValueError as error:
            raise ApiError(400, "parseError", "Parse Error") from error
        if not isinstance(content, dict):
            raise ApiError(400, "parseError", "Parse Error")
        return content


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer; Content-Length is added when it is sent."""

    status: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""


def json_answer(content: Mapping[str, Any], status: int = 200, **headers: str) -> Answer:
    return Answer(
        status,
        {"Content-Type": "application/json; charset=UTF-8", **{k.replace("_", "-"): v for k, v in headers.items()}},
        json.dumps(content).encode(),
    )


def json_error(error: ApiError) -> Answer:
    """As https://cloud.google.com/storage/docs/json_api/v1/status-codes has it; a 304 has no body."""
    if error.status == 304:
        return Answer(304)
    detail = {"message": error.message, "domain": "global", "reason": error.reason}
    return json_answer({"error": {"code": error.status, "message": error.message, "errors": [detail]}}, error.status)


def hashes_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The checksums that x-goog-hash and Content-MD5 promise, under their names in an object's metadata."""
    found: dict[str, str] = {}
    for item in headers.get("x-goog-hash", "").split(","):
        name, _, value = item.strip().partition("=")
        if name in ("crc32c", "md5"):
            found["crc32c" if name == "crc32c" else "md5Hash"] = value
    if "content-md5" in headers:
        found["md5Hash"] = headers["content-md5"]
    return found
