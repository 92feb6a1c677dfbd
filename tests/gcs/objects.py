"""What a bucket holds: objects with generations, preconditions and checksums, each change in one step under one lock.

Invariant: an object is seen whole or not at all, and no two ever have the same generation. The two APIs of the server
change objects through `Buckets` alone. Answers are as https://cloud.google.com/storage/docs/json_api describes them.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import threading
import time
from collections.abc import Mapping
from typing import Any

import google_crc32c

OWN_METADATA = ("contentType", "cacheControl", "contentEncoding", "contentDisposition", "contentLanguage", "metadata")


class ApiError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


def not_found(bucket: str, name: str | None = None) -> ApiError:
    what = "The specified bucket does not exist." if name is None else f"No such object: {bucket}/{name}"
    return ApiError(404, "notFound", what)


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """One generation of an object."""

    bucket: str
    name: str
    data: bytes
    generation: int
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created: float = dataclasses.field(default_factory=time.time)
    updated: float = dataclasses.field(default_factory=time.time)

    @functools.cached_property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()

    @property
    def etag(self) -> str:
        return base64.b64encode(str(self.generation).encode()).decode()

    def resource(self) -> dict[str, Any]:
        """As https://cloud.google.com/storage/docs/json_api/v1/objects#resource has it."""
        return {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "crc32c": self.crc32c,
            "etag": self.etag,
            "timeCreated": _timestamp(self.created),
            "updated": _timestamp(self.updated),
            **self.metadata,
        }


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The preconditions of a request; None where it has none."""

    generation_match: int | None = None
    generation_not_match: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Conditions:
        names = ("GenerationMatch", "GenerationNotMatch")
        try:
            return cls(*(int(query[f"if{n}"]) if f"if{n}" in query else None for n in names))
        except ValueError as error:
            raise ApiError(400, "invalid", f"Invalid value for a precondition: {error}") from error

    def check(self, found: StoredObject | None, *, reads: bool = False) -> None:
        """Raises 412, and 304 where a read asks for what the reader already has."""
        generation = found.generation if found else 0
        if self.generation_match not in (None, generation):
            raise _condition_not_met(412)
        if self.generation_not_match == generation:
            raise _condition_not_met(304 if reads else 412)


def _condition_not_met(status: int) -> ApiError:
    return ApiError(status, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


class Buckets:
    """All buckets of a server, in memory; may be used by several threads."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in names}
        self._last_generation = 0

    def names(self, bucket: str) -> list[str]:
        """Sorted."""
        with self._lock:
            return sorted(self._in(bucket))

    def get(self, bucket: str, name: str, conditions: Conditions, generation: int | None = None) -> StoredObject:
        with self._lock:
            found = self._in(bucket).get(name)
            if found is None or generation not in (None, found.generation):
                raise not_found(bucket, name)
            conditions.check(found, reads=True)
            return found

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        conditions: Conditions,
        metadata: Mapping[str, Any],
    ) -> StoredObject:
        """A new generation; `metadata` may name the checksum that the data must have."""
        if not name:
            raise ApiError(400, "required", "Required")
        kept = {key: metadata[key] for key in OWN_METADATA if metadata.get(key) is not None}
        made = StoredObject(bucket, name, data, 0, kept)
        if metadata.get("crc32c") not in (None, made.crc32c):
            said = f'Provided CRC32C "{metadata["crc32c"]}" doesn\'t match calculated CRC32C "{made.crc32c}".'
            raise ApiError(400, "invalid", said)
        with self._lock:
            objects = self._in(bucket)
            conditions.check(objects.get(name))
            self._last_generation = max(self._last_generation + 1, time.time_ns() // 1000)
            objects[name] = dataclasses.replace(made, generation=self._last_generation)
            return objects[name]

    def delete(self, bucket: str, name: str, conditions: Conditions, generation: int | None = None) -> None:
        with self._lock:
            found = self._in(bucket).get(name)
            if found is None or generation not in (None, found.generation):
                raise not_found(bucket, name)
            conditions.check(found)
            del self._in(bucket)[name]

    def _in(self, bucket: str) -> dict[str, StoredObject]:
        if bucket not in self._buckets:
            raise not_found(bucket)
        return self._buckets[bucket]


def _timestamp(seconds: float) -> str:
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
