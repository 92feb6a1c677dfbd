"""Objects of Google Cloud Storage, through the file system that TensorFlow brings.

Invariant: every failure is an OSError that names the path. A server that cannot be reached fails a look-up within
some 20 seconds and a put within 80, one that refuses in 5, provided that `limit_retries` was called before TensorFlow
was imported. `files` calls this for `gs://` paths.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, MutableMapping
from typing import Any

from tfdist.storage.log_sink import RewrittenLog

_RETRY_LIMITS = {
    "GCS_RETRY_CONFIG_MAX_RETRIES": "3",  # 10 if unset
    "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "100000",  # a second if unset, doubled with every retry
    "GCS_REQUEST_CONNECTION_TIMEOUT_SECS": "5",  # 120 if unset
}


def limit_retries(environment: MutableMapping[str, str]) -> None:
    """Lets a dead server fail within seconds instead of minutes, unless the user set other limits.

    TensorFlow reads these variables once, while it is imported: set later, they change nothing.
    """
    for name, value in _RETRY_LIMITS.items():
        environment.setdefault(name, value)


class GcsFiles:
    """`Files` on a `gs://` path. A put of an object is atomic by itself, and directories need not be made."""

    def read(self, path: str) -> bytes:
        with _gfile(path) as gfile, gfile.GFile(path, "rb") as file:
            return file.read()

    def write_atomic(self, path: str, data: bytes) -> None:
        with _gfile(path) as gfile, gfile.GFile(path, "wb") as file:
            file.write(data)

    def open_log(self, path: str, flush_seconds: float) -> RewrittenLog:
        try:
            existing = self.read(path)
        except FileNotFoundError:
            existing = b""
        return RewrittenLog(
            lambda content: self.write_atomic(path, content), existing=existing, interval_seconds=flush_seconds
        )

    def exists(self, path: str) -> bool:
        with _gfile(path) as gfile:
            return gfile.exists(path)

    def list_names(self, path: str) -> list[str]:
        with _gfile(path) as gfile:
            if not gfile.exists(path):  # unlike `listdir`, this tells a server that does not answer from an empty one
                return []
            return sorted({name.rstrip("/") for name in gfile.listdir(path)} - {""})

    def make_dirs(self, path: str) -> None:
        del path

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _gfile(path) as gfile:
            gfile.remove(path)


@contextlib.contextmanager
def _gfile(path: str) -> Iterator[Any]:
    """`tf.io.gfile`, whose errors become the OSErrors that a local file would raise."""
    import tensorflow as tf

    try:
        yield tf.io.gfile
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, error.message, path) from error
    except (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, error.message, path) from error
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message, path) from error
