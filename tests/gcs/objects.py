"""What a bucket holds: objects with generations, preconditions and checksums, each change in one step under one lock.

Invariant: an object is seen whole or not at all, and no two ever have the same generation. The two APIs of the server
change objects through `Buckets` alone. Answers are as https://cloud.google.com/storage/docs/json_api describes them.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import pathlib
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
    metageneration: int = 1
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created: float = dataclasses.field(default_factory=time.time)
    updated: float = dataclasses.field(default_factory=time.time)

    @functools.cached_property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4, "big")).decode()

    @functools.cached_property
    def md5(self) -> str:
        return base64.b64encode(hashlib.md5(self.data).digest()).decode()

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}/{self.metageneration}".encode()).decode()

    def resource(self) -> dict[str, Any]:
        """As https://cloud.google.com/storage/docs/json_api/v1/objects#resource has it."""
        return {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": str(len(self.data)),
            "crc32c": self.crc32c,
            "etag": self.etag,
            "timeCreated": _timestamp(self.created),
            "updated": _timestamp(self.updated),
            **self.metadata,
            "md5Hash": self.md5,
        }


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The preconditions of a request; None where it has none."""

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Conditions:
        names = ("GenerationMatch", "GenerationNotMatch", "MetagenerationMatch", "MetagenerationNotMatch")
        try:
            return cls(*(int(query[f"if{n}"]) if f"if{n}" in query else None for n in names))
        except ValueError as error:
            raise ApiError(400, "invalid", f"Invalid value for a precondition: {error}") from error

    def check(self, found: StoredObject | None, *, reads: bool = False) -> None:
        """Raises 412, and 304 where a read asks for what the reader already has."""
        generation = found.generation if found else 0
        metageneration = found.metageneration if found else None
        matches = (self.generation_match, generation), (self.metageneration_match, metageneration)
        differs = (self.generation_not_match, generation), (self.metageneration_not_match, metageneration)
        if any(wanted is not None and wanted != held for wanted, held in matches):
            raise _condition_not_met(412)
        if any(wanted is not None and wanted == held for wanted, held in differs):
            raise _condition_not_met(304 if reads else 412)


def _condition_not_met(status: int) -> ApiError:
    return ApiError(status, "conditionNotMet", "At least one of the pre-conditions you specified did not hold.")


class Buckets:
    """All buckets of a server; may be used by several threads.

    Args:
      directory: keeps the objects, so that another server finds them; None keeps them in memory.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._lock = threading.RLock()
        self._buckets: dict[str, dict[str, StoredObject]] = {}
        self._created: dict[str, float] = {}
        self._last_generation = 0
        self._directory = pathlib.Path(directory) if directory else None
        if self._directory is not None:
            self._load(self._directory)

    def create(self, bucket: str) -> dict[str, Any]:
        with self._lock:
            if bucket in self._buckets:
                raise ApiError(409, "conflict", "Your previous request to create the named bucket succeeded.")
            self._buckets[bucket] = {}
            self._created[bucket] = time.time()
            if self._directory is not None:
                (self._directory / bucket).mkdir(parents=True, exist_ok=True)
            return self.describe(bucket)

    def describe(self, bucket: str) -> dict[str, Any]:
        with self._lock:
            self._in(bucket)
            created = _timestamp(self._created[bucket])
            return {
                "kind": "storage#bucket",
                "id": bucket,
                "name": bucket,
                "metageneration": "1",
                "location": "US",
                "storageClass": "STANDARD",
                "timeCreated": created,
                "updated": created,
            }

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
        """A new generation; `metadata` may name checksums that the data must have."""
        if not name:
            raise ApiError(400, "required", "Required")
        kept = {key: metadata[key] for key in OWN_METADATA if metadata.get(key) is not None}
        made = StoredObject(bucket, name, data, 0, 1, kept)
        for key, label in (("crc32c", "CRC32C"), ("md5Hash", "MD5 hash")):
            if metadata.get(key) is None:
                continue
            computed = made.crc32c if key == "crc32c" else made.md5
            if metadata[key] != computed:
                said = f'Provided {label} "{metadata[key]}" doesn\'t match calculated {label} "{computed}".'
                raise ApiError(400, "invalid", said)
        with self._lock:
            objects = self._in(bucket)
            conditions.check(objects.get(name))
            self._last_generation = max(self._last_generation + 1, time.time_ns() // 1000)
            objects[name] = dataclasses.replace(made, generation=self._last_generation)
            self._save(objects[name])
            return objects[name]

    def patch(self, bucket: str, name: str, changes: Mapping[str, Any], conditions: Conditions) -> StoredObject:
        with self._lock:
            found = self._in(bucket).get(name)
            if found is None:
                raise not_found(bucket, name)
            conditions.check(found)
            merged = {**found.metadata, **{key: changes[key] for key in OWN_METADATA if key in changes}}
            if isinstance(changes.get("metadata"), dict):
                merged["metadata"] = {**found.metadata.get("metadata", {}), **changes["metadata"]}
                merged["metadata"] = {key: value for key, value in merged["metadata"].items() if value is not None}
            merged = {key: value for key, value in merged.items() if value is not None}
            changed = dataclasses.replace(
                found, metadata=merged, metageneration=found.metageneration + 1, updated=time.time()
            )
            self._in(bucket)[name] = changed
            self._save(changed)
            return changed

    def delete(self, bucket: str, name: str, conditions: Conditions, generation: int | None = None) -> None:
        with self._lock:
            found = self._in(bucket).get(name)
            if found is None or generation not in (None, found.generation):
                raise not_found(bucket, name)
            conditions.check(found)
            del self._in(bucket)[name]
            if self._directory is not None:
                self._file(bucket, name).unlink()

    def _in(self, bucket: str) -> dict[str, StoredObject]:
        if bucket not in self._buckets:
            raise not_found(bucket)
        return self._buckets[bucket]

    def _file(self, bucket: str, name: str) -> pathlib.Path:
        return self._directory / bucket / hashlib.sha256(name.encode()).hexdigest()

    def _save(self, stored: StoredObject) -> None:
        """A line of JSON, then the data."""
        if self._directory is None:
            return
        head = dataclasses.asdict(dataclasses.replace(stored, data=b"")) | {"data": None}
        path = self._file(stored.bucket, stored.name)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(json.dumps(head).encode() + b"\n" + stored.data)
        os.replace(temporary, path)

    def _load(self, directory: pathlib.Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
            self.create(folder.name)
            for path in folder.iterdir():
                if path.suffix == ".new":
                    continue
                head, _, data = path.read_bytes().partition(b"\n")
                stored = StoredObject(**{**json.loads(head), "data": data})
                self._buckets[folder.name][stored.name] = stored
                self._last_generation = max(self._last_generation, stored.generation)


def _timestamp(seconds: float) -> str:
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
