"""Says in a digest what a source's examples depend on, so that what was kept of them is found again, or is not.

Invariant: the same in every process and run for the same files and settings; another one for another size or time of
change of a file, another setting, or another code of a user's function.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import types
from collections.abc import Mapping
from typing import Any, cast

import keras
import numpy as np

from tfdist.data.formats.byte_ranges import FileVersion
from tfdist.storage import files


def digest(*parts: Any) -> str:
    """32 hexadecimal digits of nests of settings, functions, layers, arrays and files.

    Functions count by their name and code, and by what their closures hold; other objects by class and attributes.
    """
    return hashlib.sha256(json.dumps(_told(parts, 0)).encode()).hexdigest()[:32]


def _told(value: Any, depth: int) -> Any:
    told = functools.partial(_told, depth=depth + 1)
    if depth > 20:
        return "…"
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return hashlib.sha256(value).hexdigest()
        case np.ndarray() if value.dtype == object:
            return [value.shape, told(value.ravel().tolist())]
        case np.ndarray():
            return [str(value.dtype), value.shape, hashlib.sha256(cast(Any, np.ascontiguousarray(value))).hexdigest()]
        case FileVersion(path=path, num_bytes=size, changed_nanoseconds=changed):
            return [path if files.is_remote(path) else os.path.abspath(path), size, changed]
        case Mapping():
            return [[told(key), told(each)] for key, each in value.items()]
        case list() | tuple():
            return [told(each) for each in value]
        case set() | frozenset():
            return sorted(json.dumps(told(each)) for each in value)
        case keras.layers.Layer():
            return [type(value).__qualname__, json.dumps(value.get_config(), default=str, sort_keys=True)]
        case functools.partial():
            return [told(value.func), told(value.args), told(value.keywords)]
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return [value.__module__, value.__qualname__, _code(value.__code__), told(value.__defaults__), told(cells)]
        case types.MethodType():
            return [told(value.__func__), told(value.__self__)]
        case type() | types.BuiltinFunctionType():
            return [value.__module__, value.__qualname__]
    kind = [type(value).__module__, type(value).__qualname__]
    if dataclasses.is_dataclass(value):
        return [*kind, told({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})]
    if type(value).__repr__ is not object.__repr__:
        return [*kind, repr(value)]
    return [*kind, told(vars(value)) if hasattr(value, "__dict__") else ""]


def _code(code: types.CodeType) -> list[Any]:
    constants = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names)]
