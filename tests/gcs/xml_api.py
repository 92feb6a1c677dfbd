"""Multipart uploads of the XML API, as https://cloud.google.com/storage/docs/xml-api/post-object-multipart and the
pages beside it describe them. They know no generation precondition."""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from gcs.messages import Answer, Request, hashes_for, hashes_of
from gcs.objects import ApiError, Buckets, Conditions

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
LEAST_PART_BYTES = 5 * 1024 * 1024  # of every part but the last
MOST_PARTS = 10_000


class XmlApi:
    """Answers requests of /BUCKET/OBJECT."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._lock = threading.Lock()
        self._uploads: dict[str, tuple[str, str, str, dict[int, bytes]]] = {}

    def answer(self, request: Request) -> Answer:
        """Raises ApiError."""
        found = re.fullmatch(r"/([^/]+)/(.+)", request.path)
        if found is None:
            raise ApiError(404, "NoSuchKey", "The specified key does not exist.")
        bucket, name = unquote(found.group(1)), unquote(found.group(2))
        key = request.query.get("uploadId")
        with self._lock:
            match request.method, key:
                case "POST", None if "uploads" in request.query:
                    return self._initiate(request, bucket, name)
                case "PUT", str() if "partNumber" in request.query:
                    return self._put_part(request, key)
                case "POST", str():
                    return self._complete(request, key)
                case "DELETE", str():
                    self._find(key)
                    del self._uploads[key]
                    return Answer(204)
        raise ApiError(400, "InvalidArgument", "Invalid argument.")

    def _initiate(self, request: Request, bucket: str, name: str) -> Answer:
        self._buckets.names(bucket)  # which must exist
        key = uuid.uuid4().hex
        content_type = request.headers.get("content-type", "application/octet-stream")
        self._uploads[key] = (bucket, name, content_type, {})
        return _xml(
            "InitiateMultipartUploadResult",
            f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key><UploadId>{key}</UploadId>",
        )

    def _put_part(self, request: Request, key: str) -> Answer:
        parts = self._find(key)[3]
        number = int(request.query["partNumber"])
        if not 1 <= number <= MOST_PARTS:
            raise ApiError(400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive.")
        computed = hashes_of({"x-goog-hash": hashes_for(request.body)})
        for name, value in hashes_of(request.headers).items():
            if computed[name] != value:
                raise ApiError(400, "BadDigest", f"The {name} you specified did not match what we computed.")
        parts[number] = request.body
        return Answer(200, {"ETag": _etag(request.body), "X-Goog-Hash": hashes_for(request.body)})

    def _complete(self, request: Request, key: str) -> Answer:
        bucket, name, content_type, parts = self._find(key)
        try:
            listed = [
                (int(part.findtext("{*}PartNumber", "")), part.findtext("{*}ETag", ""))
                for part in ElementTree.fromstring(request.body).iter()
                if part.tag.rpartition("}")[2] == "Part"
            ]
        except (ElementTree.ParseError, ValueError) as error:
            raise ApiError(400, "MalformedCompleteMultipartUploadRequest", "The XML is malformed.") from error
        numbers = [number for number, _ in listed]
        if not numbers or any(parts.get(n) is None or _etag(parts[n]) != etag for n, etag in listed):
            raise ApiError(400, "InvalidPart", "One or more of the specified parts could not be found.")
        if numbers != sorted(set(numbers)):
            raise ApiError(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
        if any(len(parts[n]) < LEAST_PART_BYTES for n in numbers[:-1]):
            raise ApiError(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum object size.")
        data = b"".join(parts[n] for n in numbers)
        made = self._buckets.put(bucket, name, data, Conditions(), {"contentType": content_type}, len(numbers))
        del self._uploads[key]
        return _xml(
            "CompleteMultipartUploadResult",
            f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key><ETag>{escape(made.etag)}</ETag>",
        )

    def _find(self, key: str) -> tuple[str, str, str, dict[int, bytes]]:
        if key not in self._uploads:
            raise ApiError(404, "NoSuchUpload", "The requested upload was not found.")
        return self._uploads[key]


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _xml(name: str, content: str) -> Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><{name} xmlns='{NAMESPACE}'>{content}</{name}>"
    return Answer(200, {"Content-Type": "application/xml; charset=UTF-8"}, text.encode())
