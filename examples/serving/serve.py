"""Answers requests with a SavedModel that `--mode=export` wrote, by FastAPI; it needs no tfdist.

    pip install fastapi uvicorn tensorflow
    python serve.py runs/digits/export/saved_model --port=8000

POST /predict with {"inputs": [example, …]}, or with every input by name, gives the outputs by name. POST /predict_raw
takes texts, {"text": ["…"]}, or a table's columns by name, where the model was trained on lines of text or a table.
"""

from __future__ import annotations

import argparse
import socket

import fastapi
import tensorflow as tf
import uvicorn


def make_app(directory: str) -> fastapi.FastAPI:
    """An app that answers POST /predict, rows of each input by its name, with rows of each output; 422 for others."""
    loaded = tf.saved_model.load(directory)
    app = fastapi.FastAPI()
    for path, name in {"/predict": "serving_default", "/predict_raw": "serve_raw"}.items():
        if name in loaded.signatures:
            app.post(path)(make_predict(loaded.signatures[name]))
    app.state.loaded = loaded  # whose variables the signatures do not hold
    return app


def make_predict(signature):
    """What answers a request by a signature."""
    wanted = signature.structured_input_signature[1]

    def predict(inputs: dict[str, list]) -> dict[str, list]:
        if set(inputs) != set(wanted):
            raise fastapi.HTTPException(422, f"send {sorted(wanted)}, not {sorted(inputs)}")
        try:
            given = {name: tf.constant(inputs[name], spec.dtype) for name, spec in wanted.items()}
            return {name: value.numpy().tolist() for name, value in signature(**given).items()}
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise fastapi.HTTPException(422, str(error)) from error

    return predict


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    listening = socket.create_server(("127.0.0.1", given.port))
    app = make_app(given.directory)
    print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
