"""Makes TensorFlow's import quiet and short: drops its chatter, and leaves out what training does not use.

TF_CPP_MIN_LOG_LEVEL works only from the end of TensorFlow's import. Before that its libraries log from static
initializers (`port.cc … oneDNN custom operations are on`), which no variable silences. So nothing is shown for the
length of the import, unless the level is below 2. `--verbose` shows all of it, for an import that crashes.
`main.py` calls the functions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.util import find_spec
from typing import Any

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_GPU_DRIVER = "/dev/nvidiactl"
_DEFERRED = ("matplotlib", "matplotlib.patches", "matplotlib.pyplot", "pandas")  # Keras imports them where they are


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


class _DeferredModule(types.ModuleType):
    """Stands for a module, and imports it when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is not self:
            return getattr(importlib.import_module(self.__name__), name)
        return _DeferredClass(name, (), {"__module__": self.__name__})


class _DeferredClass(type):
    """Stands for a class of a module, which has no instances before the module is imported."""

    def __instancecheck__(cls, instance: object) -> bool:
        real = getattr(sys.modules.get(cls.__module__), cls.__name__, None)
        return real is not None and isinstance(instance, real)


@contextlib.contextmanager
def defer_imports() -> Iterator[None]:
    """Has Keras, imported in the body, import matplotlib and pandas when it first uses them."""
    modules = {n: _DeferredModule(n) for n in _DEFERRED if n not in sys.modules and find_spec(n.partition(".")[0])}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
