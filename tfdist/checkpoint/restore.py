"""Reads checkpoints: the newest that verifies, or a named one, and fits its tensors to what a program wants.

Invariant: no byte is used before the size and the CRC32C of every file of the checkpoint were found right. The training
loop restores through this; so do fine-tuning and `tfdist checkpoint`. Tensors of which each replica has a
slice are whole here, under their own names, whatever number of replicas wrote them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdist.checkpoint.catalog import Entry, read_entry, read_newest_first
from tfdist.checkpoint.format.manifest import DamagedCheckpoint, Manifest
from tfdist.checkpoint.format.tensor_files import read_files
from tfdist.errors import build_user_error, shorten_list, suggest
from tfdist.telemetry.events import EventLog


@dataclasses.dataclass(frozen=True)
class State:
    """Tensors and JSON values of a run between two steps, as a checkpoint stores and restores them.

    Attributes:
      step: optimizer updates that were done.
      tensors: by name. To save: a `tf.Variable` (also a distributed one), a Keras variable, a `tf.Tensor` or an
        array; restored: NumPy arrays that must not be written to (they may stand on a mapped file).
      values: what JSON can hold: position, sums of the epoch, the state of callbacks.
      manifest: of the checkpoint that it was read from: identity, metrics, created; None on a state to be saved.
      path: of that checkpoint.
    """

    step: int
    tensors: Mapping[str, Any]
    values: Mapping[str, Any]
    manifest: Manifest | None = None
    path: str | None = None


TensorSpecs = Mapping[str, tuple[tuple[int, ...], Any]]  # name → shape, dtype
_MOST_DIFFERENCES = 40  # in one message; `list_differences` gives all


def load_newest(directory: str, *, tell: EventLog, wanted: Callable[[str], bool] = lambda name: True) -> State | None:
    """The newest state that verifies, with what is `wanted`; None when there is none.

    One warning for each damaged checkpoint that is passed over, naming the file and what was wrong. A directory without
    a manifest is no checkpoint, and not spoken of.

    Raises:
      UserError: a newer tfdist wrote the newest one.
      OSError: the store does not answer; it is not known then what there is.
    """
    for entry in read_newest_first(directory):
        if entry.is_leftover:
            continue
        entry.check_format()
        try:
            return _load(entry, wanted)
        except DamagedCheckpoint as error:
            tell.warning(
                "checkpoint_passed_over",
                step=entry.step,
                message=f"Passed over the checkpoint of step {entry.step:,}: {error}",
                checkpoint=entry.path,
            )
    return None


def load(path: str, *, wanted: Callable[[str], bool] = lambda name: True) -> State:
    """The state in one checkpoint's directory, with the tensors that are `wanted`.

    Raises:
      UserError: `path` is no checkpoint.
      DamagedCheckpoint: naming the file and what was wrong.
      OSError: the store does not answer.
    """
    return _load(read_entry(path), wanted)


def match_tensors(tensors: Mapping[str, np.ndarray], wanted: TensorSpecs, *, partial: bool) -> dict[str, np.ndarray]:
    """Returns those of `tensors` that `wanted` names.

    Raises UserError listing what is missing, left over, or of another shape or type; with `partial` all of this is
    left out, and `list_differences` names it.
    """
    found = list_differences(tensors, wanted)
    if found and not partial:
        listed = "".join(f"\n  {line}" for line in shorten_list(found, _MOST_DIFFERENCES))
        raise build_user_error(
            f"The checkpoint does not fit this program ({len(found):,} difference{'s' * (len(found) > 1)}):"
            f"{listed}\n"
            "Train with the configuration that made it, or write train.accept_changes = True to load what fits.",
            error_id="checkpoint-mismatch",
        )
    return {name: tensors[name] for name, kind in wanted.items() if name in tensors and _fits(tensors[name], kind)}


def list_differences(tensors: Mapping[str, np.ndarray], wanted: TensorSpecs) -> list[str]:
    """Returns a line for each tensor that is missing, left over, or of another shape or type than `wanted`."""
    extra = [name for name in tensors if name not in wanted]
    lines = []
    for name, kind in wanted.items():
        if name not in tensors:
            lines.append(f"{name} {describe_array(*kind)}: not in the checkpoint.{suggest(name, extra)}")
        elif not _fits(tensors[name], kind):
            array = tensors[name]
            lines.append(
                f"{name}: {describe_array(array.shape, array.dtype)} in the checkpoint, {describe_array(*kind)} here"
            )
    for name in extra:
        lines.append(f"{name} {describe_array(tensors[name].shape, tensors[name].dtype)}: only in the checkpoint")
    return lines


def _load(entry: Entry, wanted: Callable[[str], bool]) -> State:
    if entry.manifest is None:
        raise DamagedCheckpoint(f"{entry.problem} ({entry.path})")
    try:
        files = read_files(entry.path, entry.manifest, wanted=lambda name: wanted(whole_name(name)))
        tensors = join_slices(files)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error} ({entry.path})") from error
    return State(entry.step, tensors, entry.manifest.values, entry.manifest, entry.path)


def _fits(array: np.ndarray, kind: tuple[tuple[int, ...], Any]) -> bool:
    return array.shape == tuple(kind[0]) and array.dtype.name == _type_name(kind[1])


def describe_array(shape: tuple[int, ...], dtype: Any) -> str:
    """Returns a shape and a type for messages: "float32[64, 16]"."""
    return f"{_type_name(dtype)}[{', '.join(map(str, shape))}]"


def _type_name(dtype: Any) -> str:
    """The name of a dtype of NumPy, TensorFlow or Keras, whose dtypes are strings."""
    return getattr(dtype, "name", None) or (dtype if isinstance(dtype, str) else np.dtype(dtype).name)


_MARK = re.compile(r"\.part(\d+)of(\d+)axis(\d+)")


def slice_name(name: str, index: int, *, count: int, axis: int) -> str:
    """Returns the name of a slice: "dense/kernel.part0of2axis1" for `index` 0 of `count` 2 along `axis` 1."""
    return f"{name}.part{index}of{count}axis{axis}"


def whole_name(name: str) -> str:
    """The name without a mark; "dense/kernel" for "dense/kernel.part0of2axis1", also within a slot's name."""
    return _MARK.sub("", name)


def cut_slice(array: np.ndarray, name: str) -> np.ndarray:
    """Returns the slice of a whole array that a marked name means; the whole array for any other name."""
    found = _MARK.search(name)
    if found is None or not array.ndim:
        return array
    index, count, axis = map(int, found.groups())
    return np.split(array, count, axis)[index]


def whole_shape(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Returns a variable's full shape from the shape and name of its slice; other names keep their shape."""
    found = _MARK.search(name)
    if found is None or not shape:
        return shape
    _, count, axis = map(int, found.groups())
    return (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])


def join_slices(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, with slices put together under the name of the whole.

    Raises:
      DamagedCheckpoint: a slice is missing.
    """
    found: dict[str, np.ndarray] = {}
    parts: dict[str, dict[int, tuple[str, np.ndarray]]] = {}
    for name, array in tensors.items():
        mark = _MARK.search(name)
        if mark is None:
            found[name] = array
        else:
            parts.setdefault(whole_name(name), {})[int(mark[1])] = (name, array)
    for name, some in parts.items():
        first, array = some[min(some)]
        _, count, axis = map(int, _MARK.search(first).groups())  # type: ignore[union-attr]
        if len(some) != count:
            raise DamagedCheckpoint(f"of the {count} parts of {name} it has {len(some)}")
        found[name] = np.concatenate([some[i][1] for i in range(count)], axis) if array.ndim else array
        found[name].flags.writeable = False
    return found
