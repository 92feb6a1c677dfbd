"""What `--mode=export` does: the trained model in other forms, each run by a fresh process and compared.

Invariant: export/report.json names only exports whose outputs were compared with the model's on real examples.
"""

from __future__ import annotations

import keyword
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.batches import BatchPlan
from tfdist.data.pipeline import build_pipeline
from tfdist.data.sources.source import Preprocessing, Source
from tfdist.errors import UserError, check_package
from tfdist.serving import run_export
from tfdist.serving.inputs import InputsAlone, find_builder, name_outputs
from tfdist.serving.serving_settings import EXPORTS, ExportSettings
from tfdist.storage import files
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.strategy import Topology
from tfdist.telemetry.json_text import to_json
from tfdist.training.loop.learner import build_model
from tfdist.training.recovery.matching import natural_key
from tfdist.training.recovery.weights import find_weights, put_weights
from tfdist.training.run import assembly, validate_run
from tfdist.training.run.eval_sets import first_function
from tfdist.training.run.request import Request
from tfdist.training.run.run import Run, open_run
from tfdist.training.step.precision import set_precision
from tfdist.user_code import format_exception

RAW = run_export.RAW
NAMES = {"saved_model": "saved_model", "litert": "model.tflite", "onnx": "model.onnx"}
Arrays = dict[str, np.ndarray]


def export(settings: ExportSettings, request: Request) -> dict[str, Any]:
    """Writes the model in every format that is asked for, beside export/model.keras.

    Returns:
      What export/report.json gets.

    Raises:
      UserError: something given is wrong, or the model cannot be had in a format.
    """
    builder = find_builder(settings, request.run_dir)
    check_packages(settings)
    with open_run(request, OneDevice(), mode="export") as run, tempfile.TemporaryDirectory(prefix="tfdist-") as scratch:
        set_precision(settings.precision)
        found = find_weights(run, settings.weights, settings.policy, setting="export.weights")
        files.make_dirs(run.directory.export)
        source = assembly.open_source(run, first_function(settings.data), "comparison")
        task = InputsAlone(settings.task)
        model = build_model(builder, task, source.structure)
        put_weights(run, model, found)
        inputs = _draw_examples(source, task, settings.num_examples)
        num_examples = len(tf.nest.flatten(inputs)[0])
        outputs = name_outputs(model, tf.nest.map_structure(tf.constant, inputs))
        expected = {name: keras.ops.convert_to_numpy(value) for name, value in outputs.items()}
        exports = {}
        is_quantized = False
        for kind in sorted(settings.formats, key=EXPORTS.index):  # LiteRT, which quantizes by itself, is first
            if settings.quantize is not None and kind != "litert" and not is_quantized:
                is_quantized = True
                with warnings.catch_warnings(action="ignore"):  # of each layer that stays as it is
                    model.quantize(settings.quantize)
            path = os.path.join(scratch, NAMES[kind])
            raw = source.preprocessing() if kind == "saved_model" and task.is_plain else None
            _write_export(model, kind, path, task.inputs(source.structure), raw=raw, quantize=settings.quantize)
            given = _run_in_process(kind, path, _name_inputs(inputs), scratch)
            num_bytes = _copy(path, files.join(run.directory.export, NAMES[kind]))
            exports[kind] = _compare(expected, given) | {"bytes": num_bytes}
            if raw is not None:
                rows = _name_inputs(raw.first(num_examples))
                given = _run_in_process(RAW, path, rows, scratch)
                exports[kind]["raw"] = _compare(expected, given) | {"inputs": list(_name_inputs(raw.inputs))}
            exports[kind]["path"] = files.join(run.directory.export, NAMES[kind])
            _report(run, kind, exports[kind])
        report = {
            "weights": found.path,
            "step": found.step,
            "quantized": settings.quantize,
            "num_examples": num_examples,
            "exports": exports,
        }
        files.write_atomic(run.directory.export_report, to_json(report, indent=2) + "\n")
        return report


def validate_export(settings: ExportSettings, run_dir: str, tell: Callable[[str], None]) -> None:
    """Checks what can be checked of an export without writing one."""
    check_packages(settings)
    task, data = InputsAlone(settings.task), first_function(settings.data)
    validate_run.check_use(settings, find_builder(settings, run_dir), task, data, OneDevice(), tell)


def check_packages(settings: ExportSettings) -> None:
    """Raises UserError where a package is missing that a format needs."""
    if "onnx" in settings.formats:
        for package in ("onnxruntime", "tf2onnx"):
            check_package(package, package, "onnx", "export.formats = ['onnx']")


def _draw_examples(source: Source, task: InputsAlone, count: int) -> Any:
    """The inputs of the first examples, a nest of arrays."""
    count = min(count, source.num_examples)
    plan = BatchPlan(num_examples=source.num_examples, global_batch_size=count, num_replicas=1)
    batch = next(iter(build_pipeline(source, plan, Topology(0, 1, 1))))["examples"]
    return tf.nest.map_structure(lambda t: t.numpy(), task.inputs(batch))


def _name_inputs(nest: Any) -> Arrays:
    """The inputs by the names that exports know them by, identifiers, in the order of `tf.nest`."""
    if isinstance(nest, Mapping):
        found: dict[str, Any] = {}
        for name, each in sorted(nest.items()):
            known = re.sub(r"\W", "_", name, flags=re.ASCII)
            if not known[:1].isalpha() or keyword.iskeyword(known) or known == "self":
                known = f"input_{known}"
            found[f"{known}_{len(found)}" if known in found else known] = each
        return found
    flat = tf.nest.flatten(nest)
    return {"inputs" if len(flat) == 1 else f"inputs_{i}": each for i, each in enumerate(flat)}


def _name_specs(structure: Any) -> Any:
    """`tf.TensorSpec`s with the names that exports know inputs by."""
    names = iter(_name_inputs(structure))
    return tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape, spec.dtype, name=next(names)), structure)


def _write_export(
    model: keras.Model, kind: str, path: str, structure: Any, *, raw: Preprocessing | None, quantize: str | None
) -> None:
    """Writes one export to a local path.

    Args:
      model: of the run.
      kind: of `EXPORTS`.
      path: new.
      structure: of the model's inputs.
      raw: a SavedModel gets a signature for inputs before this, too.
      quantize: as `ExportSettings` has it; LiteRT's converter, which takes no int8 layers of Keras, does so by itself.
    """
    named = _name_specs(structure)
    try:
        with warnings.catch_warnings(action="ignore"):
            if kind == "saved_model":
                archive = keras.export.ExportArchive()
                archive.track(model)
                archive.add_endpoint("serve", lambda inputs: name_outputs(model, inputs), [named])
                if raw is not None:
                    archive.track(raw.kept)
                    signature = [_name_specs(dict(raw.inputs))]
                    archive.add_endpoint(RAW, lambda given: name_outputs(model, raw.function(given)), signature)
                archive.write_out(path, verbose=False)
            else:
                own = {"optimizations": [tf.lite.Optimize.DEFAULT]} if quantize and kind == "litert" else {}
                model.export(path, format=kind, verbose=False, input_signature=[named], **own)
    except Exception as error:  # whatever a converter raises about the model
        raise UserError(f"The model cannot be exported as {kind}: {format_exception(error)}") from error


def _run_in_process(kind: str, path: str, inputs: Arrays, scratch: str) -> Arrays:
    """Runs an export in a process without tfdist; returns its outputs."""
    examples, outputs = os.path.join(scratch, "examples.npz"), os.path.join(scratch, "outputs.npz")
    run_export.save_arrays(examples, inputs)
    command = [sys.executable, "-I", run_export.__file__, kind, path, examples, outputs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"The export as {kind} does not run: {last[0]}")
    with np.load(outputs) as held:
        return {name: held[name] for name in held.files}


def _compare(expected: Arrays, given: Arrays) -> dict[str, Any]:
    """The largest difference of each output; of scores of classes also how often the highest one is the same."""
    if set(given) != set(expected):  # a format with names of its own, numbered in the order of the outputs
        given = dict(zip(expected, (given[name] for name in sorted(given, key=natural_key)), strict=True))
    found: dict[str, Any] = {"largest_difference": {}, "same_class": {}}
    for name, ours in expected.items():
        theirs = given[name].reshape(ours.shape)
        if ours.dtype.kind in "biufc":
            difference = np.abs(ours.astype(np.complex128) - theirs.astype(np.complex128))
        else:
            difference = ours.astype(np.bytes_) != theirs
        found["largest_difference"][name] = float(difference.max(initial=0.0))
        if ours.ndim > 1 and ours.shape[-1] > 1:
            found["same_class"][name] = float(np.mean(ours.argmax(-1) == theirs.argmax(-1)))
    return found


def _copy(path: str, target: str) -> int:
    """Copies a file or a tree into the run directory; returns its size in bytes."""
    if os.path.isfile(path):
        content = pathlib.Path(path).read_bytes()
        files.write_atomic(target, content)
        return len(content)
    return files.replace_tree(target, path, last="saved_model.pb")


def _report(run: Run, kind: str, found: Mapping[str, Any]) -> None:
    compared = (found, found.get("raw", found))
    largest = max(max(each["largest_difference"].values()) for each in compared)
    shares = [share for each in compared for share in each["same_class"].values()]
    same = f"; the same class for {min(shares):.1%}" if shares else ""
    message = f"{kind}: {found['bytes']:,} bytes, at most {largest:.2g} from the model's outputs{same}; {found['path']}"
    run.events.info("exported", message=message, kind=kind, **found)
