"""Keeps TensorFlow's own chatter off the terminal while a user has not asked for it; `main.py` calls both functions.

TF_CPP_MIN_LOG_LEVEL works only from the end of TensorFlow's import. Before that its libraries log from static
initializers (`port.cc … oneDNN custom operations are on`), which no variable silences. So nothing is shown for the
length of the import, unless the level is below 2. `--verbose` leaves all as it is, for an import that crashes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_GPU_DRIVER = "/dev/nvidiactl"


def quiet_tensorflow(environment: MutableMapping[str, str]) -> None:
    """Sets TensorFlow's log level, unless the user set it.

    On a machine without a GPU even its errors (level 3), since `failed call to cuInit` is one: what goes wrong reaches
    Python as an exception all the same. With one, errors stay (level 2), since they say why the GPU is not used.
    """
    environment.setdefault(_LOG_LEVEL, "2" if os.path.exists(_GPU_DRIVER) else "3")


@contextlib.contextmanager
def quiet_import(environment: Mapping[str, str]) -> Iterator[None]:
    """Drops what `import tensorflow` in its body, which is to hold little else, writes to standard error."""
    terminal = None
    if environment.get(_LOG_LEVEL) in ("2", "3"):
        with contextlib.suppress(OSError):  # there is no standard error
            terminal = os.dup(2)
    if terminal is None:
        yield
        return
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
