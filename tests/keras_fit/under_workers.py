"""`tfdist.fit` on each of several workers, by TF_CONFIG: writes weights and histories into the file it is given."""

from __future__ import annotations

import pathlib
import pickle
import sys

import numpy as np
from keras_fit.behaviors import Numbered, X, Y, batches, classifier, dataset

import tfdist
from tfdist.errors import UserError
from tfdist.strategies.multi_worker import MultiWorker


def main(path: str) -> None:
    strategy = MultiWorker(peer_timeout_seconds=120)
    found = {}
    data = {"arrays": lambda: (X, Y), "dataset": lambda: (dataset(),), "numbered": lambda: (Numbered(),)}
    for name, make in data.items():
        with strategy.scope():
            model = classifier()
        history = tfdist.fit(model, *make(), epochs=2, seed=5, validation_data=(X[:20], Y[:20]), verbose=0)
        found[name] = {"history": history.history, "weights": [np.asarray(w) for w in model.get_weights()]}
    found["evaluated"] = [model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)]
    try:
        model.fit(X, Y, verbose=0)
    except UserError as error:
        found["own fit"] = str(error)
    try:
        tfdist.fit(model, batches(), steps_per_epoch=2, verbose=0)
    except ValueError as error:
        found["generator"] = str(error)
    pathlib.Path(path).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
