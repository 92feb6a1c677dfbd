"""What a bucket holds: objects with generations, preconditions and checksums, each change in one step under one lock.

Invariant: an object is seen whole or not at all, and no two ever have the same generation. The server changes objects
through `Buckets` alone. Answers are as https://cloud.google.com/storage/docs/json_api describes them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import threading
import time
from typing import Any

import google_crc32c


class ApiError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


@dataclasses.dataclass(frozen=True)
class StoredObject:
    """One generation of an object; `metadata` is what its writer says of it."""

    bucket: str
    name: str
    data: bytes
    generation: int
    metadata: dict[str, str] | None = None

    @functools.cached_property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()

    def resource(self) -> dict[str, Any]:
        """As https://cloud.google.com/storage/docs/json_api/v1/objects#resource has it."""
        return {
            "kind": "storage#object",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "size": str(len(self.data)),
            "crc32c": self.crc32c,
            "metadata": self.metadata or {},
        }


class Buckets:
    """All buckets of a server, in memory; may be used by several threads.

    Where a method takes `generation_match`, the object must have this generation, 0 for none; None asks for nothing.
    """

    def __init__(self, *names: str) -> None:
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in names}
        self._last_generation = 0

    def names(self, bucket: str) -> list[str]:
        """Sorted."""
        with self._lock:
            return sorted(self._in(bucket))

    def get(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        with self._lock:
            found = self._in(bucket).get(name)
            if found is None or generation not in (None, found.generation):
                raise ApiError(404, "notFound", f"No such object: {bucket}/{name}")
            return found

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        *,
        crc32c: str | None = None,
        metadata: dict[str, str] | None = None,
        generation_match: int | None = None,
    ) -> StoredObject:
        """A new generation, of data that must have the checksum, where one is given."""
        made = StoredObject(bucket, name, data, 0, metadata)
        if not name or crc32c not in (None, made.crc32c):
            raise ApiError(400, "invalid", f"The CRC32C of {name!r} is {made.crc32c}, not {crc32c}.")
        with self._lock:
            objects = self._in(bucket)
            _check_generation(objects.get(name), generation_match)
            self._last_generation = max(self._last_generation + 1, time.time_ns() // 1000)
            objects[name] = dataclasses.replace(made, generation=self._last_generation)
            return objects[name]

    def delete(self, bucket: str, name: str, generation_match: int | None = None) -> None:
        with self._lock:
            _check_generation(self.get(bucket, name), generation_match)
            del self._in(bucket)[name]

    def _in(self, bucket: str) -> dict[str, StoredObject]:
        if bucket not in self._buckets:
            raise ApiError(404, "notFound", "The specified bucket does not exist.")
        return self._buckets[bucket]


def _check_generation(found: StoredObject | None, wanted: int | None) -> None:
    if wanted not in (None, found.generation if found else 0):
        raise ApiError(412, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")
