"""Finds what a configuration names outside itself: gin files and Python modules.

Invariant: everything that is not found, or fails when it is read, becomes a `UserError` that says where it was looked
for and what is near. Knows nothing of gin; called by `loading`, `gin_names` and `statements`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from tfdist.errors import UserError, build_user_error, suggest
from tfdist.storage import files as stored

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = "tfdist:"  # begins the name of a file of those that come with tfdist
CONFIGS = REPOSITORY / "tfdist" / "configs"
FRAMEWORKS = ("keras", "numpy", "tensorflow", "tfdist")
ALIASES = {"np": "import numpy as np", "tf": "import tensorflow as tf"}
REMOVED = {  # what gin files of an earlier version include, import and set, with what to write instead
    "runs/train_and_evaluate.gin": "Remove it. Write for the macros MODEL, OPTIMIZER, TASK, TRAIN_DATA and EVAL_DATA "
    "train.model, train.optimizer, train.task, train.train_data, train.eval_data; evaluate takes them from there.",
    "tfdist.data.pipeline.served": "End your own pipeline with tf.data.experimental.service: docs/data.md.",
    "tfdist.data.sources.tfds_source": "It lies elsewhere: write `from tfdist.data.formats import tfds_source`.",
    "tfdist.tuning.places": "Write `from tfdist.tuning.execution import executor`.",
    "tfdist.tasks.base": "Write `from tfdist.tasks.task import Task, Term`.",
    "tfdist.strategies.base": "Write `from tfdist.strategies.strategy import Strategy`.",
    "tfdist.data.cache": "Decode the examples into .npy files once, for array_files.ArrayFiles: docs/data.md.",
    "policy.CheckpointPolicy.compression": "Checkpoints are not compressed: remove the line.",
    "text.TextLines.separator": "Separate each label from its text by a tab.",
    "train.canonical_replicas": "Write train.deterministic = 8, with that number.",
    "train.tensor_parallel": "Write train.sharding = ['mlp_*'], with these patterns.",
    "train.eval_every_steps": "Write train.eval_every = '500 steps'.",
    "train.eval_every_epochs": "Write train.eval_every = 2, or a list of epochs.",
    "train.renew_batch_statistics": "train.swa_start does so by itself: remove the line.",
    "train.on_divergence": "Remove it: train.recovery is 'on'. Write train.recovery = @tfdist.Rollback() to set it.",
    "train.start_from_names": "Write train.start_from = ('runs/a', {'encoder/(.*)': 'backbone/\\\\1'}).",
    "train.partial_restore": "Write train.accept_changes = True.",
    "schedules.Warmup.shape": "The rise is linear: remove the line.",
    "schedules.WarmupStableDecay.shape": "The fall is linear: remove the line.",
    "convnet.build_convnet.batch_normalization": "Write a model of your own, or @resnet.build_resnet.",
    "tables.Table.null_values": "A missing value is an empty cell, NA, NaN, nan or null: write one of these.",
    "tune.seeds_per_trial": "Search 'train.seed' too, by @search.Grid(), and average the rows of trials.csv.",
    "tune.max_failures": "Three trials in a row that fail by a bug of tfdist end a sweep: remove the line.",
    "mirrored.Mirrored.num_gpus": "Set CUDA_VISIBLE_DEVICES=0,1 to use these two.",
    "horovod.Horovod.fusion_threshold_bytes": "Set the environment variable HOROVOD_FUSION_THRESHOLD.",
    "horovod.Horovod.cycle_time_milliseconds": "Set the environment variable HOROVOD_CYCLE_TIME.",
    "opentelemetry.OpenTelemetry.sample_rate": "Set OTEL_TRACES_SAMPLER=traceidratio and OTEL_TRACES_SAMPLER_ARG.",
    "train.initial_epoch": "Take these epochs off train.epochs, and begin with train.start_from.",
}


def find_gin_file(name: str, *, including: Path | None = None) -> Path:
    """The file that `--gin_file=name`, or `include 'name'` in another file, means.

    Looks in the directory of the including file, the working directory, the directories above the including file and
    the directory that holds tfdist, in this order. `tfdist:experiments/digits.gin` is a file that comes with tfdist.
    """
    if name.startswith(SHIPPED):
        return _find_shipped(name.removeprefix(SHIPPED))
    directories = [Path.cwd(), REPOSITORY]
    if including is not None:
        above = including.absolute().parents
        directories = [above[0], Path.cwd(), *above[1:], REPOSITORY]
    directories = [Path("/")] if Path(name).is_absolute() else list(dict.fromkeys(directories))
    try:
        found = next((path for each in directories if (path := each / name).is_file()), None)
    except OSError as error:  # a name that is too long, or a directory that may not be looked into
        raise UserError(f"the gin file {name!r} cannot be looked for: {error.strerror}.") from error
    if found is not None:
        return found
    if (gone := name.removeprefix("configs/")) in REMOVED:
        return _find_shipped(gone)
    if not name:
        raise UserError(f"the name of a gin file is empty. Write, for example, {SHIPPED}experiments/digits.gin")
    if Path(name).is_dir():
        raise UserError(f"{name} is a directory; write the gin file in it that is meant.")
    named = directories if len(directories) < 4 else [*directories[:2], f"{len(directories) - 2} more directories"]
    looked = " and ".join(map(str, named))
    hint = "" if Path(name).is_absolute() else f" Looked for it in {looked}."
    raise build_user_error(
        f"there is no gin file {name!r}.{hint}{_suggest_files(name, directories)}", error_id="missing-file"
    )


def _find_shipped(name: str) -> Path:
    found = CONFIGS / name
    if not name.startswith("/") and ".." not in found.parts and found.is_file():
        return found
    if name in REMOVED:
        raise UserError(f"tfdist comes with no gin file {name!r} any more. {REMOVED[name]}")
    known = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.glob("*/*.gin"))
    near = suggest(name, known) or f" There are {', '.join(known)}."
    raise UserError(f"tfdist comes with no gin file {name!r}.{near}")


def _suggest_files(name: str, directories: Iterable[Path]) -> str:
    parent = Path(name).parent
    for directory in directories:
        if (directory / parent).is_dir():
            hint = suggest(name, [str(parent / found.name) for found in (directory / parent).glob("*.gin")])
            if hint:
                return hint
    return ""


def read_text(path: str) -> str:
    """The text of a gin file, local or in a bucket, without the byte order mark that some editors write.

    Raises:
      UserError: it cannot be read.
    """
    try:
        return stored.read(path).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the gin file {path} cannot be read: {' '.join(str(error).split())}") from error


def shorten_path(path: Path) -> str:
    """The path as a user would write it: relative when it lies below the working directory."""
    relative = os.path.relpath(path.absolute())
    return str(path.absolute()) if relative.startswith("..") else relative


def search_modules_in(directories: Iterable[Path]) -> None:
    """Lets modules be imported that lie in these directories, after all others, so that none hides an installed one."""
    for directory in directories:
        if str(directory) not in sys.path:
            sys.path.append(str(directory))


def find_directory(module: ModuleType) -> Path | None:
    """The directory that has to be searched to import a module; None for one that lies in no file."""
    location = next(iter(getattr(module, "__path__", [])), None) or getattr(module, "__file__", None)
    return Path(location).resolve().parent if location else None


def import_module(statement: str, module: str) -> None:
    """Imports a module, and says what was wrong if that fails.

    Args:
      statement: the import as it was written, `from my_package import my_module`.
      module: the full name, `my_package.my_module`.

    Raises:
      UserError: there is no such module, or the user's own code in it fails. A failure within tfdist or a framework is
        nothing that the user wrote and comes through as it is.
    """
    try:
        importlib.import_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise UserError(_explain_missing(statement, error.name or module)) from error
        if module.split(".")[0] in FRAMEWORKS:
            raise
        raise _explain_failure(statement, error) from error


def _explain_missing(statement: str, missing: str) -> str:
    if missing in REMOVED:
        return f"{statement!r}: tfdist has no {missing} any more. {REMOVED[missing]}"
    parent, _, leaf = missing.rpartition(".")
    holder = sys.modules.get(parent)
    if holder is not None and hasattr(holder, leaf):
        above, _, own = parent.rpartition(".")
        instead = f"from {above} import {own}" if above else f"import {parent}"
        return (
            f"{statement!r}: {leaf!r} is a name in the module {parent}, and a gin file imports modules only. "
            f"Write {instead!r}, and {own or parent}.{leaf} where it is used."
        )
    paths = list(getattr(holder, "__path__", [])) if parent else None
    near = suggest(leaf, sorted(found.name for found in pkgutil.iter_modules(paths)))
    where = f"{parent} has no module {leaf!r}." if parent else f"there is no module {leaf!r}."
    advice = "" if near else " Is it installed, or does it lie beside the gin file or in the working directory?"
    return f"{statement!r}: {where}{near}{advice}"


def _explain_failure(statement: str, error: BaseException) -> UserError:
    """Describes the failure of a module of the user's own, with the lines that led to it."""
    if isinstance(error, SyntaxError):
        lines = [f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
        lines = [f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in own[-3:]]
    if isinstance(error, ModuleNotFoundError) and error.name in REMOVED:
        lines.append(f"tfdist has no {error.name} any more. {REMOVED[error.name]}")
    return build_user_error(
        "\n    ".join([f"{statement!r} failed: {type(error).__name__}: {error}", *lines]), error_id="code-failure"
    )


def guess_import(name: str) -> str:
    """The import that probably gives a name: a module of tfdist, or an installed one; empty when there is none."""
    if name in ALIASES:
        return ALIASES[name]
    found = [path for path in (REPOSITORY / "tfdist").rglob(f"{name}.py") if not name.startswith("_")]
    if found:
        parts = found[0].relative_to(REPOSITORY).with_suffix("").parts
        return f"from {'.'.join(parts[:-1])} import {parts[-1]}"
    try:
        return f"import {name}" if importlib.util.find_spec(name) else ""
    except (ImportError, ValueError):
        return ""


def is_submodule(holder: object, name: str) -> bool:
    """Whether `name` is a module in the package `holder` that nothing has imported yet."""
    if not isinstance(holder, ModuleType) or not hasattr(holder, "__path__"):
        return False
    return importlib.util.find_spec(f"{holder.__name__}.{name}") is not None
