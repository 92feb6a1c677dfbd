"""Runs an exported model as a program does that knows nothing of tfdist, and keeps what it gives.

    python run_export.py KIND EXPORT EXAMPLES.npz OUTPUTS.npz

Started by exporting.py in a process of its own. KIND is saved_model, serve_raw (that signature of it), litert or onnx;
EXAMPLES holds the inputs by name.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

RAW = "serve_raw"  # the signature of a SavedModel that has its source's preprocessing inside


def run_saved_model(path: str, inputs: dict[str, Any], signature: str = "serving_default") -> dict[str, Any]:
    """Runs a signature of a SavedModel; returns its outputs."""
    import tensorflow as tf

    model = tf.saved_model.load(path)
    called = model.signatures[signature]
    given = {name: tf.constant(inputs[name]) for name in called.structured_input_signature[1]}
    return {name: value.numpy() for name, value in called(**given).items()}


def run_litert(path: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs of the default signature, one example after the other."""
    import tensorflow as tf

    runner = tf.lite.Interpreter(model_path=path).get_signature_runner()
    given = rename_inputs(inputs, list(runner.get_input_details()))
    count = len(next(iter(inputs.values())))
    rows = [runner(**{name: value[i : i + 1] for name, value in given.items()}) for i in range(count)]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def run_onnx(path: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Runs an ONNX graph; returns its outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = rename_inputs(inputs, [each.name for each in session.get_inputs()])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def rename_inputs(inputs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The inputs by the names that an export has for them; one input may have any."""
    return dict(zip(names, inputs.values(), strict=True)) if len(inputs) == 1 else {n: inputs[n] for n in names}


RUNS = {
    "saved_model": run_saved_model,
    RAW: lambda path, inputs: run_saved_model(path, inputs, RAW),
    "litert": run_litert,
    "onnx": run_onnx,
}


def main(kind: str, path: str, examples: str, outputs: str) -> None:
    """Runs the exported model at `path` on the inputs in one .npz file; writes its outputs to another."""
    with np.load(examples) as held:
        inputs = {name: held[name] for name in held.files}
    found = RUNS[kind](path, inputs)
    assert "tfdist" not in sys.modules
    save_arrays(outputs, found)


def save_arrays(path: str, arrays: dict[str, Any]) -> None:
    """Writes an .npz file, texts as bytes of one length."""
    np.savez(path, **{name: a.astype(np.bytes_) if a.dtype == object else a for name, a in arrays.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
