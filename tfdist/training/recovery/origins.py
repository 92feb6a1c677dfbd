"""Reads variables out of files of any origin: a table has how each kind is recognized and how its arrays are read.

Invariant: nothing of a file is executed or unpickled. Only arrays are read, each when it is asked for, and none from
outside of what the path names. weights.py and `tfdist convert` open files by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import mmap
import os
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from google.protobuf import descriptor_pool, message, message_factory

from tfdist.checkpoint.format import tensor_files
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.errors import UserError, build_user_error, check_package, format_first_line
from tfdist.settings.checks import SWITCH, Check, is_text, or_none
from tfdist.storage import files
from tfdist.training.recovery.matching import SavedArray, natural_key

KERAS_FILES = (".keras", ".weights.h5")
HDF5_FILES = (".keras", ".h5", ".hdf5")
KINDS = (
    "a run directory, a checkpoint in it, .keras, .weights.h5, .h5, .safetensors, a TensorFlow checkpoint, a "
    "SavedModel or an Orbax directory"
)
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
WRONG_VALUES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
DAMAGE = (*WRONG_VALUES, zipfile.BadZipFile, message.DecodeError)  # which readers raise
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
OF_OPTIMIZER = re.compile(r"(^|/)(optimizer/(?!_trainable_variables)|_variables/\d+/|keras_api/|\.OPTIMIZER_SLOT/)")
ORDERED = re.compile(r"(^|/)(layer_with_weights-|variables/|_trainable_variables/|_operations/)\d+/")


def _are_names(value: object) -> bool:
    """Returns whether a value maps regular expressions to replacements that `re.sub` takes."""
    if not isinstance(value, Mapping) or not value:
        return False
    try:
        return all(isinstance(there, str) and re.compile(here) for here, there in value.items())
    except (re.error, TypeError):
        return False


NAMES = Check("{'encoder/(.*)': 'backbone/\\\\1'}", _are_names)
PATH = Check(f"a path: {KINDS}", is_text)


@dataclasses.dataclass(frozen=True)
class StartFrom:
    """Weights to start from, for `train.start_from` and `tfdist.fit`.

    Args:
      path: of a run directory, a checkpoint or a file of another program, local or gs://.
      names: by a regular expression that names of the model's variables match, what they are called there.
      partial: whether what does not fit is left out, instead of refused.
      optimizer: whether the slots of SGD, Adam and AdamW, and the number of updates, are taken as well where they fit.

    Raises:
      UserError: one of them is of another type.
    """

    path: str
    names: Mapping[str, str] | None = None
    partial: bool = False
    optimizer: bool = False

    def __post_init__(self) -> None:
        PATH("StartFrom.path", self.path)
        or_none(NAMES)("StartFrom.names", self.names)
        SWITCH("StartFrom.partial", self.partial)
        SWITCH("StartFrom.optimizer", self.optimizer)


@dataclasses.dataclass(frozen=True)
class Origin:
    """A kind of files with variables.

    Attributes:
      kind: for messages.
      locate: the file, directory or prefix to read, for a path; None where the path is of another kind.
      read: the arrays by name, of a local path; what it opens stays open until the stack is closed.
    """

    kind: str
    locate: Callable[[str], str | None]
    read: Callable[[str, contextlib.ExitStack], dict[str, SavedArray]]


def find_origin(path: str) -> tuple[Origin, str] | None:
    """The kind of what lies at a path, and the path to read; None where it is no kind of file that is known."""
    for origin in ORIGINS:
        target = origin.locate(path)
        if target is not None:
            return origin, target
    return None


@contextlib.contextmanager
def open_arrays(path: str) -> Iterator[tuple[str, dict[str, SavedArray]]]:
    """The kind and the arrays of a file; they can be read until the context is left.

    Raises:
      UserError: it is of no kind that is known, or is damaged.
    """
    found = find_origin(path)
    if found is None:
        raise UserError(f"{path!r} has no weights that can be read. Write {KINDS}.")
    origin, target = found
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(copy_locally(target))
        with _explain_damage(path, origin.kind, DAMAGE):
            arrays = origin.read(local, stack)
        with _explain_damage(path, origin.kind):
            yield origin.kind, arrays


@contextlib.contextmanager
def _explain_damage(path: str, kind: str, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raises UserError for what readers raise of a file that is damaged, or is another than its name says."""
    try:
        yield
    except (tf.errors.OpError, DamagedCheckpoint, OSError, *errors) as error:
        raise build_user_error(
            f"{path} cannot be read as {kind}: {format_first_line(error)} Copy it again from its source.",
            error_id="checkpoint-mismatch",
        ) from error


@contextlib.contextmanager
def copy_locally(target: str) -> Iterator[str]:
    """A local path of what may lie on gs://: a file, a directory, or all files `target.…` of a prefix."""
    if not files.is_remote(target):
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-weights-") as scratch:
        folder = target.rpartition("/")[0]
        for path in _list_files(target):
            copy = os.path.join(scratch, path.removeprefix(f"{folder}/"))
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            with open(copy, "wb") as file:
                file.write(files.read(path))
        yield os.path.join(scratch, target.removeprefix(f"{folder}/"))


def _list_files(target: str) -> list[str]:
    """The files of a target: itself, those in it, or those of its prefix."""
    if files.is_dir(target):
        return [files.join(target, name) for name in files.list_tree(target)]
    folder, name = os.path.split(target)
    return [files.join(folder, each) for each in files.list_names(folder or ".") if f"{each}.".startswith(f"{name}.")]


def hash_files(path: str) -> str:
    """The SHA-256 of all that `open_arrays` would read."""
    found, digest = find_origin(path), hashlib.sha256()
    for each in _list_files(found[1] if found else path):
        digest.update(files.read(each))
    return digest.hexdigest()


def _locate_file(path: str, *, suffixes: tuple[str, ...]) -> str | None:
    return path if path.endswith(suffixes) and files.exists(path) else None


def _locate_safetensors(path: str) -> str | None:
    if files.is_dir(path) and any(name.endswith(".safetensors") for name in files.list_names(path)):
        return path
    return _locate_file(path, suffixes=(".safetensors",))


def _read_safetensors(path: str, stack: contextlib.ExitStack) -> dict[str, SavedArray]:
    names = [name for name in sorted(os.listdir(path)) if name.endswith(".safetensors")] if os.path.isdir(path) else []
    arrays: dict[str, np.ndarray] = {}
    for name in [os.path.join(path, name) for name in names] or [path]:
        with open(name, "rb") as file:
            arrays |= tensor_files.read(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    return {name: SavedArray.of(array) for name, array in arrays.items()}


def _locate_saved_model(path: str) -> str | None:
    return files.join(path, "variables", "variables") if files.exists(files.join(path, "saved_model.pb")) else None


def _locate_tf_checkpoint(path: str) -> str | None:
    """The prefix of a checkpoint: the path itself, or in a directory what its file `checkpoint` says, or the newest."""
    prefix = path.removesuffix(".index")
    if files.exists(f"{prefix}.index"):
        return prefix
    names = files.list_names(path) if files.is_dir(path) else []
    prefixes = [name.removesuffix(".index") for name in names if name.endswith(".index")]
    if not prefixes:
        return None
    state = files.join(path, "checkpoint")
    latest = files.read(state).decode().partition("\n")[0] if files.exists(state) else ""
    said = [prefix for prefix in prefixes if re.search(f'["/]{re.escape(prefix)}"$', latest)]
    return files.join(path, max(said or prefixes, key=natural_key))


def _read_tf_checkpoint(prefix: str, stack: contextlib.ExitStack) -> dict[str, SavedArray]:
    """The variables of a TF1 or TF2 checkpoint; those of an object graph by their own names, where they are unique."""
    reader = tf.train.load_checkpoint(prefix)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    keys = [key for key in shapes if dtypes[key] != tf.string]
    if any(key.startswith("variables/") for key in keys):  # of Keras 3, which lists each of them twice
        keys = [key for key in keys if not key.startswith("_all_variables/")]
    full_names: dict[str, str] = {}
    if GRAPH in shapes:
        kind = descriptor_pool.Default().FindMessageTypeByName("tensorflow.TrackableObjectGraph")
        nodes = message_factory.GetMessageClass(kind).FromString(reader.get_tensor(GRAPH)).nodes
        full_names = {each.checkpoint_key: each.full_name for node in nodes for each in node.attributes}
    counts = Counter(full_names.get(key) for key in keys)
    arrays = {}
    for rank, key in enumerate(sorted(keys, key=natural_key)):
        full_name = full_names.get(key)
        name = full_name if full_name and counts[full_name] == 1 else key.removesuffix(VALUE)
        name = f"optimizer/{name}" if OF_OPTIMIZER.search(key) else name.removesuffix(":0")
        read = functools.partial(reader.get_tensor, key)
        arrays[name] = SavedArray(tuple(shapes[key]), dtypes[key].name, read, rank if ORDERED.search(key) else None)
    return arrays


def _read_hdf5(path: str, stack: contextlib.ExitStack) -> dict[str, SavedArray]:
    """The variables of a Keras file: with the layers' order of Keras 1 and 2, or by the paths of Keras 3."""
    source: Any = path
    kind = ""  # of the optimizer
    if path.endswith(".keras"):
        with zipfile.ZipFile(path) as archive:
            source = io.BytesIO(archive.read("model.weights.h5"))
            optimizer = (json.loads(archive.read("config.json")).get("compile_config") or {}).get("optimizer")
        kind = optimizer["class_name"] if isinstance(optimizer, dict) else ""
    file = stack.enter_context(h5py.File(source, "r"))
    root = file.get("model_weights", file)
    if root is file and not _read_names(file, "layer_names"):
        paths: list[str] = []
        file.visititems(lambda name, node: paths.append(name) if isinstance(node, h5py.Dataset) else None)
        paths.sort(key=natural_key)
        return {each.replace("optimizer/", f"optimizer/{kind}/"): _describe_dataset(file, each) for each in paths}
    arrays: dict[str, SavedArray] = {}
    for layer in _read_names(root, "layer_names"):
        for weight in _read_names(root[layer], "weight_names"):
            name = weight.removesuffix(":0")
            name = f"{layer}/{name}" if name in arrays else name
            arrays[name] = _describe_dataset(file, f"{root.name}/{layer}/{weight}", rank=len(arrays))
    for slot in _read_names(file.get("optimizer_weights", file), "weight_names"):
        arrays[f"optimizer/{slot.removesuffix(':0')}"] = _describe_dataset(file, f"optimizer_weights/{slot}")
    return arrays


def is_of_keras_2(path: str) -> bool:
    """Whether a local file has the layout of Keras 1 and 2; False for one that is no HDF5 file."""
    try:
        with h5py.File(path) as file:
            return "model_weights" in file or bool(_read_names(file, "layer_names"))
    except OSError:
        return False


def _read_names(group: h5py.Group, attribute: str) -> list[str]:
    """An attribute with names, which Keras cuts into several, numbered ones where they are too many."""
    parts = [key for key in sorted(group.attrs, key=natural_key) if re.fullmatch(rf"{attribute}\d*", key)]
    names = [name for part in parts for name in group.attrs[part]]
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def _describe_dataset(file: h5py.File, path: str, *, rank: int | None = None) -> SavedArray:
    """Raises UserError for one that lies in another file, which a link names."""
    dataset = file[path]
    is_here = isinstance(dataset, h5py.Dataset) and dataset.file.filename == file.filename
    if not is_here or dataset.external or dataset.is_virtual:
        raise UserError(f"{path!r} in {file.filename!r} lies in another file. Only the file itself is read.")
    return SavedArray(dataset.shape, dataset.dtype.name, lambda: dataset[()], rank)


def _locate_orbax(path: str) -> str | None:
    """The directory of the arrays: the path, the newest step of a CheckpointManager, or the item of one of them."""
    steps = [name for name in files.list_names(path) if name.isdigit()] if files.is_dir(path) else []
    parents = [path, files.join(path, max(steps, key=int))] if steps else [path]
    targets = (files.join(parent, item) if item else parent for parent in parents for item in ("", "default", "pytree"))
    return next((target for target in targets if files.exists(files.join(target, "_METADATA"))), None)


def _read_orbax(path: str, stack: contextlib.ExitStack) -> dict[str, SavedArray]:
    check_package("orbax.checkpoint", "orbax-checkpoint", "orbax", "An Orbax checkpoint")
    import orbax.checkpoint as orbax  # which brings JAX with it

    checkpointer = orbax.PyTreeCheckpointer()
    metadata = checkpointer.metadata(os.path.abspath(path))
    tree = getattr(getattr(metadata, "item_metadata", metadata), "tree", metadata)
    as_numpy = keras.tree.map_structure(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), tree)
    restored = checkpointer.restore(os.path.abspath(path), restore_args=as_numpy)
    leaves = keras.tree.flatten_with_path(restored)
    return {"/".join(map(str, keys)): SavedArray.of(np.asarray(leaf)) for keys, leaf in leaves}


ORIGINS = (
    Origin("a SavedModel", _locate_saved_model, _read_tf_checkpoint),
    Origin("a Keras file", functools.partial(_locate_file, suffixes=HDF5_FILES), _read_hdf5),
    Origin("safetensors", _locate_safetensors, _read_safetensors),
    Origin("an Orbax checkpoint", _locate_orbax, _read_orbax),
    Origin("a TensorFlow checkpoint", _locate_tf_checkpoint, _read_tf_checkpoint),
)
