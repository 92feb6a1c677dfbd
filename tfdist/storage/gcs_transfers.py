"""Moves the content of objects: uploads in one request, downloads of several ranges at once.

Invariant: an object appears whole and checked or not at all, by one request that carries the precondition; an answer to
it that was lost is found out by a mark of the writer on the object. Buffers are sent from where they lie.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import errno
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from tfdist.storage.contents import crc32c
from tfdist.storage.gcs_requests import (
    PARALLEL,
    TIMEOUT,
    Attempts,
    ShortAnswerError,
    SupersededError,
    client,
    make_blob,
    persist,
    session,
    split_path,
)

RANGE_BYTES = 16 << 20  # larger reads are done in ranges
_SEND_BYTES = 1 << 17  # each is to be taken within CONNECT_SECONDS, of each of several uploads at once
_READ_BYTES = 1 << 20
_WRITER = "tfdist-writer"


def upload(path: str, parts: Sequence[memoryview], *, replaces: int | None, checksum: int | None = None) -> int:
    """Stores an object; returns its generation.

    Args:
      path: gs://BUCKET/NAME.
      parts: the content.
      replaces: the generation that the object must have now, 0 for none; None replaces whatever is there.
      checksum: CRC-32C of the content where it is known.

    Raises:
      SupersededError: the object has another generation, and it is not this call's.
    """
    checksum = crc32c(*parts) if checksum is None else checksum
    bucket, name = split_path(path)
    writer = uuid.uuid4().hex
    # The server compares the checksum before it stores anything.
    encoded = base64.b64encode(checksum.to_bytes(4, "big")).decode()
    attempts = Attempts(path)
    body = _Multipart({"name": name, "crc32c": encoded, "metadata": {_WRITER: writer}}, parts, attempts.record_sent)
    condition = {} if replaces is None else {"ifGenerationMatch": str(replaces)}

    def send() -> int:
        make_blob(path)  # which a path without a name is not
        answer = session().post(
            f"{client().api_endpoint}/upload/storage/v1/b/{quote(bucket, safe='')}/o",
            params={"uploadType": "multipart", **condition},
            data=body,
            headers={"Content-Type": body.content_type},
            timeout=TIMEOUT,
        )
        _raise_for(answer, 200)
        return int(answer.json()["generation"])

    try:
        return persist(path, send, attempts)
    except SupersededError:  # by an earlier try, whose answer was lost, or by another writer
        with contextlib.suppress(FileNotFoundError):
            found = look_up(path)
            if (found.metadata or {}).get(_WRITER) == writer:
                return found.generation
        raise


def download(path: str, first: int, buffer: memoryview, generation: int | None = None) -> int:
    """Fills a buffer from byte `first` on, by ranges of one generation; returns how much there was of it."""
    if buffer.nbytes <= RANGE_BYTES:
        return _download_range(path, first, buffer, generation)
    generation = generation or look_up(path).generation
    places = range(0, buffer.nbytes, RANGE_BYTES)
    with _pool() as pool:
        return sum(
            pool.map(lambda at: _download_range(path, first + at, buffer[at : at + RANGE_BYTES], generation), places)
        )


def delete_all(paths: Sequence[str]) -> None:
    """Deletes objects, several at once; missing ones are fine."""
    contexts = [contextvars.copy_context() for _ in paths]
    with _pool() as pool:
        list(pool.map(lambda context, path: context.run(delete, path), contexts, paths))


def delete(path: str, generation: int | None = None) -> None:
    """Deletes an object, or only this generation of it; a missing one is fine."""
    with contextlib.suppress(FileNotFoundError, *([] if generation is None else [SupersededError])):
        persist(path, lambda: make_blob(path).delete(if_generation_match=generation, retry=None, timeout=TIMEOUT))


def look_up(path: str) -> Any:
    """The object's metadata as the library's `Blob`; raises FileNotFoundError."""
    found = make_blob(path)
    persist(path, lambda: found.reload(retry=None, timeout=TIMEOUT))
    return found


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for one file; where one fails, what has not begun is dropped."""
    pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="tfdist-gcs")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Multipart:
    """The body of an upload with metadata (https://www.rfc-editor.org/rfc/rfc2387), sent piece by piece, uncopied.

    `on_sent` is called behind each piece.
    """

    def __init__(self, metadata: dict[str, Any], parts: Sequence[memoryview], on_sent: Callable[[], None]) -> None:
        self._on_sent = on_sent
        boundary = uuid.uuid4().hex
        self.content_type = f"multipart/related; boundary={boundary}"
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
            f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        self._pieces = [memoryview(head.encode()), *parts, memoryview(f"\r\n--{boundary}--".encode())]

    def __len__(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            for at in range(0, piece.nbytes, _SEND_BYTES):
                yield piece[at : at + _SEND_BYTES]
                self._on_sent()


def _download_range(path: str, first: int, buffer: memoryview, generation: int | None) -> int:
    """One range; what had come before a break is not asked for again."""
    done, attempts = 0, Attempts(path)
    while done < buffer.nbytes:
        before = done
        try:
            with _open_range(path, first + done, first + buffer.nbytes, generation) as answer:
                if answer.status_code == 416:
                    return done
                generation = int(answer.headers["x-goog-generation"])
                end = min(buffer.nbytes, int(answer.headers["content-range"].rpartition("/")[2]) - first)
                while done < end:
                    piece = answer.raw.read(min(_READ_BYTES, end - done))
                    if not piece:
                        raise ShortAnswerError(f"the answer ended {end - done:,} bytes early")
                    buffer[done : done + len(piece)] = piece
                    done += len(piece)
                return done
        except Exception as error:
            if done > before:
                attempts.record_progress()
            if getattr(error, "code", None) == 404 and generation is not None:
                raise OSError(errno.ESTALE, "it was replaced or removed while it was read", path) from error
            attempts.wait_after(error)
    return done


def _open_range(path: str, first: int, end: int, generation: int | None) -> Any:
    """An answer of status 206, whose body is still to come, or 416 where the object ends before."""
    bucket, name = split_path(path)
    make_blob(path)
    version = {} if generation is None else {"generation": str(generation)}
    answer = session().get(
        f"{client().api_endpoint}/download/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}",
        params={"alt": "media", **version},
        headers={"Range": f"bytes={first}-{end - 1}"},
        timeout=TIMEOUT,
        stream=True,
    )
    _raise_for(answer, 206, 416)
    answer.raw.decode_content = False  # the bytes as they are stored
    return answer


def _raise_for(answer: Any, *good: int) -> None:
    from google.api_core.exceptions import from_http_response

    if answer.status_code not in good:
        raise from_http_response(answer)
