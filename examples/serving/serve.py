"""Answers requests with a SavedModel that `--mode=export` wrote, by FastAPI; it needs no tfdist.

    pip install fastapi uvicorn tensorflow
    python serve.py runs/digits/export/saved_model --port=8000

POST /predict with {"inputs": [example, …]}, or with every input by name, gives the outputs by name.
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
    signature = loaded.signatures["serving_default"]
    wanted = signature.structured_input_signature[1]
    app = fastapi.FastAPI()

    @app.post("/predict")
    def predict(inputs: dict[str, list]) -> dict[str, list]:
        if set(inputs) != set(wanted):
            raise fastapi.HTTPException(422, f"send {sorted(wanted)}, not {sorted(inputs)}")
        try:
            given = {name: tf.constant(inputs[name], spec.dtype) for name, spec in wanted.items()}
            return {name: value.numpy().tolist() for name, value in signature(**given).items()}
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise fastapi.HTTPException(422, str(error)) from error

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    listening = socket.create_server(("127.0.0.1", given.port))
    app = make_app(given.directory)
    print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
