"""Finds prepared TensorFlow Datasets without touching the network, and prepares them where that is allowed.

Invariant: without `download` no code of the data set runs and nothing is fetched: what was prepared is read from its
own directory. `tensorflow_datasets` is imported when it is first needed, not before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from typing import Any

from tfdist.errors import UserError, missing_extra, suggest
from tfdist.storage import files

DEFAULT_DIRECTORY = os.path.join("~", "tensorflow_datasets")


def find_builder(name: str, *, data_dir: str | None, download: bool) -> Any:
    """The builder of a prepared data set.

    Args:
      name: as TFDS writes it: "mnist", "mnist:3.0.1", "glue/cola".
      data_dir: where data sets lie, local or gs://; None takes TFDS's own ~/tensorflow_datasets.
      download: whether to download and prepare what is not there. One process does, under a lock; the others wait.

    Raises:
      UserError: it is not prepared, or cannot be; or the package is missing.
    """
    tfds = import_tfds()
    directory = data_dir or DEFAULT_DIRECTORY
    directory = directory if files.is_remote(directory) else os.path.expanduser(directory)
    builder = _prepared(tfds, name, directory)
    if builder is not None:
        return builder
    if not download:
        there = _names_in(directory)
        raise UserError(
            f"The TensorFlow data set {name!r} is not prepared in {directory}; "
            f"{f'there are {there}' if there else 'there is none'}.{suggest(name, there)} Prepare it where there is a "
            f"network, with: tfds build {name} --data_dir={directory}, or write load_tfds.download = True."
        )
    if files.is_remote(directory):
        raise UserError(
            f"download = True prepares in a local directory, where workers can wait for each other; received "
            f"data_dir = {directory!r}. Prepare it once, with: tfds build {name} --data_dir={directory}, and leave "
            "download away."
        )
    with _lock(directory, name):
        builder = _prepared(tfds, name, directory)  # by whoever had the lock before
        return builder if builder is not None else _prepare(tfds, name, directory)


def import_tfds() -> Any:
    """The package, or the message that says how to install it."""
    try:
        import importlib_resources  # noqa: F401 - TFDS needs it and does not ask for it
        import tensorflow_datasets
    except ImportError as error:
        missing = getattr(error, "name", None) or "tensorflow-datasets"
        raise missing_extra(
            missing.replace("tensorflow_datasets", "tensorflow-datasets"), "tfds", "load_tfds"
        ) from error
    return tensorflow_datasets


def _prepared(tfds: Any, name: str, directory: str) -> Any | None:
    from tensorflow_datasets.core import registered

    if not files.exists(directory):
        return None
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=directory)
    except registered.DatasetNotFoundError:
        return None
    except ValueError as error:  # a name that TFDS does not parse
        raise UserError(f"{name!r} is no name of a TensorFlow data set: {_first_line(error)}") from error


def _prepare(tfds: Any, name: str, directory: str) -> Any:
    from tensorflow_datasets.core import registered

    try:
        builder = tfds.builder(name, data_dir=directory)
    except registered.DatasetNotFoundError as error:
        raise UserError(
            f"TensorFlow Datasets knows no {name!r}.{suggest(name, tfds.list_builders(with_community_datasets=False))} "
            "A data set of your own is known once its module is imported in the gin file."
        ) from error
    try:
        builder.download_and_prepare()
    except Exception as error:  # whatever the network, the disk or the builder's own code says
        raise UserError(
            f"{name!r} could not be downloaded and prepared in {directory}: {_first_line(error)}"
        ) from error
    return builder


@contextlib.contextmanager
def _lock(directory: str, name: str) -> Iterator[None]:
    """Waits until no other process prepares this data set here; the system takes the lock from one that dies."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f".{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.tfdist-lock")
    with open(path, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _names_in(directory: str) -> list[str]:
    return [name for name in files.list_names(directory) if not name.startswith((".", "downloads"))]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
