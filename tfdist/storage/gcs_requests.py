"""One client of Google Cloud Storage a process, and how long a request is tried again.

Invariant: every failure leaves as an OSError that names the path, after as much patience as that failure deserves; no
message holds a credential. These come from Google's default chain (a user without any reads public buckets), the
address of an emulator from STORAGE_EMULATOR_HOST, both through the library. The `gcs` modules send all they send so.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import functools
import os
import random
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tfdist.errors import StoreUnavailableError, check_package, redact

CONNECT_SECONDS = 5.0  # also what sending one piece of a body may take
TIMEOUT = (CONNECT_SECONDS, 10.0)
PARALLEL = 8  # transfers at once of one file; one stream of a bucket gives some 200 MiB/s

# A failure is final when so much time has passed since the request, or its last progress, in which nothing was sent.
_REFUSED_PATIENCE_SECONDS = 4.0  # nobody listens there, or the name is not known
_SILENT_PATIENCE_SECONDS = 20.0
_BUSY_PATIENCE_SECONDS = 60.0  # a server that answers 429 or 503, or breaks off, is alive
_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_JITTER = random.Random()  # of its own: from the process's generator layers draw the seeds of their weights
_FIRST_DELAY_SECONDS, _MOST_DELAY_SECONDS = 0.2, 8.0

_most_patience_seconds = contextvars.ContextVar("tfdist_gcs_patience", default=float("inf"))

_T = TypeVar("_T")


class SupersededError(FileExistsError):
    """A precondition failed: the object is not the one that was to be replaced."""


class ShortAnswerError(Exception):
    """A body that ended before its length."""


@functools.cache
def client() -> Any:
    """The client of this process; a forked child makes its own."""
    check_package("google.cloud.storage", "google-cloud-storage", "gcs", "A gs:// path")
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage
    from requests.adapters import HTTPAdapter

    try:
        made = storage.Client(project=None)
    except DefaultCredentialsError:
        made = storage.Client.create_anonymous_client()
    # For traces a thread of the library would ask for the bucket, and draw its delays from the user's generator.
    made._bucket_metadata_cache = None
    for scheme in ("https://", "http://"):
        made._http.mount(scheme, HTTPAdapter(pool_connections=PARALLEL, pool_maxsize=8 * PARALLEL))
    return made


forget_client = client.cache_clear
os.register_at_fork(after_in_child=forget_client)


def session() -> Any:
    """The `requests.Session` of the client, which adds the credentials."""
    return client()._http


def split_path(path: str) -> tuple[str, str]:
    """Bucket and name of a gs:// path; the name is "" for the bucket itself."""
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return bucket, name


def make_blob(path: str) -> Any:
    """The library's `Blob` of a path; nothing is asked for yet."""
    bucket, name = split_path(path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return client().bucket(bucket).blob(name)


@contextlib.contextmanager
def limit_patience(seconds: float) -> Iterator[None]:
    """Limits, while the context lasts, for how many seconds its requests are tried again."""
    token = _most_patience_seconds.set(seconds)
    try:
        yield
    finally:
        _most_patience_seconds.reset(token)


def persist(path: str, call: Callable[[], _T], attempts: Attempts | None = None) -> _T:
    """Returns what `call` returns, tried again while that may help; `call` itself must try once and may run again."""
    attempts = attempts or Attempts(path)
    while True:
        try:
            return call()
        except Exception as error:
            attempts.wait_after(error)


class Attempts:
    """The tries of one request: exponential backoff with jitter, and the end of patience."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.record_progress()

    def record_progress(self) -> None:
        """Restarts the timeouts and the delay, as bytes have arrived."""
        self._idle_seconds = 0.0
        self._moved_at = time.monotonic()
        self._is_sending = False
        self._delay = _FIRST_DELAY_SECONDS

    def record_sent(self) -> None:
        """A piece of this try was taken: sending it counts as no waiting, however slow the network is."""
        now = time.monotonic()
        if not self._is_sending:
            self._idle_seconds += now - self._moved_at
        self._moved_at, self._is_sending = now, True

    def wait_after(self, error: Exception) -> None:
        """Waits for the next try; raises what the failure means where there should be none."""
        if not isinstance(error, _failures()):
            raise error
        delay = self._delay * _JITTER.uniform(0.5, 1.0)
        now = time.monotonic()
        self._idle_seconds += now - self._moved_at
        self._moved_at, self._is_sending = now, False
        if self._idle_seconds + delay > min(_patience_seconds(error), _most_patience_seconds.get()):
            raise convert_error(self._path, error) from error
        time.sleep(delay)
        self._delay = min(self._delay * 2, _MOST_DELAY_SECONDS)


def convert_error(path: str, error: Exception) -> OSError:
    """Converts a failure of the library to an OSError."""
    from google.auth import exceptions as auth

    if isinstance(error, OSError) and error.filename is not None:
        return error
    text = _reason(error)
    code = getattr(error, "code", None)
    if code == 404:
        return FileNotFoundError(errno.ENOENT, text, path)
    if code == 412:
        return SupersededError(errno.EEXIST, text, path)
    is_unreachable = any(isinstance(cause, auth.TransportError) for cause in _causes(error))
    refused = isinstance(error, auth.GoogleAuthError) and not is_unreachable
    if code in (401, 403) or refused:
        return PermissionError(errno.EACCES, text, path)
    kind = StoreUnavailableError if is_unreachable or _patience_seconds(error) > 0 else OSError
    return kind(errno.EIO, text, path)


def _failures() -> tuple[type[Exception], ...]:
    """The classes of what a request can end with; anything else is a bug, or already a message to the user."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from urllib3.exceptions import HTTPError

    return OSError, ShortAnswerError, GoogleAPIError, GoogleAuthError, HTTPError  # requests' own are OSErrors


def _patience_seconds(error: Exception) -> float:
    """How long a failure like this may be tried again; 0 for never."""
    import requests
    from urllib3 import exceptions as urllib3

    if isinstance(error, OSError) and error.filename is not None:  # said by us
        return 0.0
    causes = list(_causes(error))
    codes = (getattr(cause, "code", None) for cause in causes)
    status = next((code for code in codes if isinstance(code, int)), None)
    if status is not None:
        return _BUSY_PATIENCE_SECONDS if status in _RETRIED_STATUSES else 0.0
    if any(isinstance(cause, urllib3.NewConnectionError) for cause in causes):  # a kind of ConnectTimeoutError, too
        return _REFUSED_PATIENCE_SECONDS
    if any(isinstance(cause, (requests.Timeout, urllib3.TimeoutError, TimeoutError)) for cause in causes):
        return _SILENT_PATIENCE_SECONDS
    broken = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError, urllib3.HTTPError, ConnectionError)
    return _BUSY_PATIENCE_SECONDS if any(isinstance(c, (*broken, ShortAnswerError)) for c in causes) else 0.0


def _reason(error: Exception) -> str:
    """One line; of a connection that failed the host, and what the operating system said."""
    place = urllib.parse.urlsplit(getattr(getattr(error, "request", None), "url", None) or "").netloc.rpartition("@")[2]
    text = str(getattr(error, "message", "") or error)
    if place:
        said = [str(cause) for cause in _causes(error) if isinstance(cause, OSError) and cause.strerror]
        text = f"{place}: {said[-1] if said else text}"
    return redact(" ".join(text.split()))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those it was made from, which libraries keep in several places."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if any(found is each for each in seen):
            continue
        seen.append(found)
        yield found
        inner = [*found.args, getattr(found, "reason", None), getattr(found, "original_error", None), found.__cause__]
        waiting += [each for each in inner if isinstance(each, BaseException)]
