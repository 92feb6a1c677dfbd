"""Keeps TensorFlow's own chatter off the terminal while a user has not asked for it.

Invariant: a line that TF_CPP_MIN_LOG_LEVEL lets through, a Python warning and a traceback are always shown. `main.py`
calls both functions before anything else imports TensorFlow.

TF_CPP_MIN_LOG_LEVEL works only from the end of TensorFlow's import. Before that its libraries log from static
initializers (`port.cc … oneDNN custom operations are on`), which no variable silences. So standard error goes to a
file for the length of the import, and what that level would let through follows. A crash of the import itself shows
its last words with `--verbose` alone, which leaves all as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_GPU_DRIVER = "/dev/nvidiactl"
_SEVERITIES = b"IWEF"
# `I0000 00:00:1795257599.776092    5261 port.cc:153] …`, or `2026-01-31 10:00:00.123456: W tensorflow/x.cc:12] …`.
_LOG_LINE = re.compile(rb"(?:[\d-]+ [\d:.]+: )?(?P<severity>[IWEF])(?:\d{4} [\d:.]+ +\d+)? [\w./-]+:\d+\] ")
_ALWAYS_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog|.*Unable to register cu[A-Z]\w+ factory"
)


def quiet_tensorflow(environment: MutableMapping[str, str]) -> None:
    """Sets TensorFlow's log level, unless the user set it.

    On a machine without a GPU even its errors (level 3), since `failed call to cuInit` is one: what goes wrong reaches
    Python as an exception all the same. With one, errors stay (level 2), since they say why the GPU is not used.
    """
    environment.setdefault(_LOG_LEVEL, "2" if os.path.exists(_GPU_DRIVER) else "3")


@contextlib.contextmanager
def quiet_import(environment: Mapping[str, str]) -> Iterator[None]:
    """Applies the log level of `environment` to `import tensorflow` in its body, which is to hold little else."""
    level = environment.get(_LOG_LEVEL, "0")
    terminal = None
    if level in ("1", "2", "3"):
        with contextlib.suppress(OSError):  # there is no standard error
            terminal = os.dup(2)
    if terminal is None:
        yield
        return
    with tempfile.TemporaryFile() as log:
        sys.stderr.flush()
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            log.seek(0)
            for line in passing_lines(log, int(level)):
                os.write(2, line)


def passing_lines(lines: Iterable[bytes], level: int) -> Iterator[bytes]:
    """The lines that are no log lines, and those of at least severity `level` (0 info … 3 fatal)."""
    for line in lines:
        match = _LOG_LINE.match(line)
        severity = len(_SEVERITIES) if match is None else _SEVERITIES.index(match["severity"])
        if severity >= level and not _ALWAYS_NOISE.match(line):
            yield line
