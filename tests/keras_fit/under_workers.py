"""`tfdist.fit` on each of several workers: writes what comes of it into a file named by the worker's number."""

from __future__ import annotations

import pathlib
import pickle
import sys
from typing import Any

import keras
import numpy as np
from keras_fit.behaviors import Numbered, X, Y, batches, classifier

import tfdist
from tfdist.errors import UserError
from tfdist.strategies.multi_worker import MultiWorker


def fit_in_own_order(model: keras.Model) -> dict[str, Any]:
    """Trains on a PyDataset's batches in another order each epoch; returns what can be seen of it."""
    history = tfdist.fit(model, Numbered(), epochs=2, seed=5, validation_data=(X[:20], Y[:20]), verbose=0)
    return {
        "history": history.history,
        "weights": [np.asarray(w) for w in model.get_weights()],
        "evaluated": [model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)],
    }


def main(directory: str) -> None:
    strategy = MultiWorker(peer_timeout_seconds=120)
    with strategy.scope():
        model = classifier()
    found = fit_in_own_order(model)
    try:
        model.fit(X, Y, verbose=0)
    except UserError as error:
        found["own fit"] = str(error)
    try:
        tfdist.fit(model, batches(), steps_per_epoch=2, verbose=0)
    except ValueError as error:
        found["generator"] = str(error)
    pathlib.Path(directory, str(strategy.topology.worker_index)).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
