"""`tfdist convert IN OUT [EXPERIMENT.gin]`: weights of any origin in another format.

Invariant: OUT is written whole or not at all, and nothing is written over.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import command_line
from tfdist.command_line import flags
from tfdist.errors import EXIT_DONE, UserError, printable
from tfdist.storage import files

OUTPUTS = (".safetensors", ".keras", ".weights.h5")
USAGE = "tfdist convert IN OUT [EXPERIMENT.gin [NAME=VALUE …]]"
ABOUT = f"""\
{USAGE}

Writes the weights of IN, whatever train.start_from takes, to OUT: a file in {", ".join(OUTPUTS)} format.

With an experiment they become those of its model, by its own names; unless IN is a run's checkpoint, a line for each
says from where. Without an experiment OUT is .safetensors, and has the arrays of IN as they are.
"""
FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("gin_file", [], "of the model", flag_values=FLAGS)
flags.DEFINE_multi_string("gin_param", [], "a setting of the model", flag_values=FLAGS)
flags.DEFINE_bool("partial", False, "leave out what does not fit the model", flag_values=FLAGS)


def run(arguments: Sequence[str]) -> int:
    """Converts what the arguments name; returns the exit status."""
    options, operands = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT, hint=f"Write: {USAGE}")
    if len(operands) != 2 or not operands[1].endswith(OUTPUTS):
        raise UserError(f"Received {' '.join(operands)!r}. Write: {USAGE}. OUT ends with {' or '.join(OUTPUTS)}.")
    path, target = operands
    if files.exists(target):
        raise UserError(f"{target} exists. Write another name, or remove it.")
    if not options.gin_file and not target.endswith(".safetensors"):
        raise UserError(f"{target} needs a model. Write: tfdist convert {path} {target} EXPERIMENT.gin")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from tfdist import main

    convert = functools.partial(_convert, path=path, target=target, partial=options.partial)
    main.import_tensorflow(verbose=False)
    main.use_training(options, convert) if options.gin_file else convert(None)
    _show(f"{target}: written")
    return EXIT_DONE


def _convert(settings: Any, *, path: str, target: str, partial: bool) -> None:
    """Writes the weights of the experiment's model, loaded with those at a path; without one those that lie there."""
    from tfdist.training.recovery.matching import SavedArray, is_weight
    from tfdist.training.recovery.origins import StartFrom
    from tfdist.training.recovery.weights import find_by_path, load_weights, open_weights
    from tfdist.training.run.validate_run import as_event_log, build_alone
    from tfdist.training.step.state import MODEL, ModelState
    from tfdist.tuning.search.hypermodel import builder_of, read, takes_hyperparameters

    found = find_by_path(path, "IN", tell=as_event_log(_show))
    if settings is None:
        with open_weights(found) as (_, saved):
            _write_safetensors(target, {name: array for name, array in saved.items() if is_weight(name)})
        return
    if settings.hyperparameters is None and takes_hyperparameters(settings.model):  # of the run, then, that has them
        folder = os.path.dirname(found.path)
        known = read(folder) or read(os.path.dirname(folder))
        settings = dataclasses.replace(settings, hyperparameters=known and known.values)
    model = build_alone(settings, builder_of(settings))
    loaded = load_weights(model, found, start=StartFrom(path, partial=partial))
    for line in [*loaded.report, *(f"left out: {line}" for line in loaded.left_out)]:
        _show(line)
    files.make_dirs(os.path.dirname(target) or ".")
    if target.endswith(".safetensors"):
        arrays = ModelState(model).arrays().items()
        _write_safetensors(target, {name.removeprefix(MODEL): SavedArray.of(array) for name, array in arrays})
        return
    with tempfile.TemporaryDirectory(prefix="tfdist-convert-") as scratch:
        copy = os.path.join(scratch, os.path.basename(target))
        try:
            model.save(copy) if target.endswith(".keras") else model.save_weights(copy)
        except NotImplementedError as error:  # of `get_config`
            raise UserError(f"Keras cannot save {type(model).__name__} whole. Write OUT.weights.h5.") from error
        with open(copy, "rb") as file:
            files.write_atomic(target, file.read())


def _write_safetensors(target: str, arrays: Mapping[str, Any]) -> None:
    """Writes one array behind the other, each as it is read."""
    import numpy as np

    from tfdist.checkpoint.format.tensor_files import TensorSpec, plan_files

    specs = [TensorSpec(name, np.dtype(array.dtype), tuple(array.shape)) for name, array in arrays.items()]
    (plan,) = plan_files(specs, max_file_bytes=sys.maxsize)
    ordered = (np.ascontiguousarray(arrays[spec.name].read()) for spec, _ in plan.offsets)
    files.write_new(target, itertools.chain([plan.header], (array.reshape(-1).view(np.uint8) for array in ordered)))


def _show(text: str) -> None:
    """Prints what files, which may be anybody's, hold."""
    print(printable(text), flush=True)
