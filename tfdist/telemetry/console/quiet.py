"""Keeps TensorFlow's own chatter off the terminal while a user has not asked for it.

Invariant: a line that TF_CPP_MIN_LOG_LEVEL lets through, a Python warning, a traceback and the last words of a crash
are always shown. `main.py` calls both functions before anything else imports TensorFlow.

TF_CPP_MIN_LOG_LEVEL works only from the end of TensorFlow's import. Before that its libraries log from static
initializers (`port.cc … oneDNN custom operations are on`, `cudart_stub.cc`, `Unable to register cuFFT factory`),
which no variable silences. For the length of the import a small process of its own therefore reads file descriptor 2
and passes on what that level would. A process, not a thread or a file, because it outlives a crash of this one.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_GPU_DRIVER = "/dev/nvidiactl"
_DRAIN_SECONDS = 2.0
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
    reader = _start_filter(level) if level in ("1", "2", "3") else None
    if reader is None:
        yield
        return
    assert reader.stdin is not None
    sys.stderr.flush()
    terminal = os.dup(2)
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that the body left behind holds the pipe
            reader.wait(_DRAIN_SECONDS)


def passing_lines(lines: Iterable[bytes], level: int) -> Iterator[bytes]:
    """The lines that are no log lines, and those of at least severity `level` (0 info … 3 fatal)."""
    for line in lines:
        match = _LOG_LINE.match(line)
        severity = len(_SEVERITIES) if match is None else _SEVERITIES.index(match["severity"])
        if severity >= level and not _ALWAYS_NOISE.match(line):
            yield line


def _start_filter(level: str) -> subprocess.Popen[bytes] | None:
    """This file as a program, out of the reach of Ctrl-C; None where there is no standard error or no process left."""
    try:
        os.fstat(2)
        return subprocess.Popen([sys.executable, "-IS", __file__, level], stdin=subprocess.PIPE, start_new_session=True)
    except OSError:
        return None


if __name__ == "__main__":
    for passing in passing_lines(sys.stdin.buffer, int(sys.argv[1])):
        os.write(2, passing)
