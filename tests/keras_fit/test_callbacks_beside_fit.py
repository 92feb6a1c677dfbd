"""Each of Keras's callbacks, and a spy, see and do under every strategy what they see and do in Keras's own `fit`."""

from __future__ import annotations

import csv
import json
import pathlib
import pickle
import urllib.parse
from typing import Any

import keras
import pytest
import support
import tensorflow as tf
from equivalence.runs import HOROVOD
from keras_fit.behaviors import classifier
from keras_fit.callback_cases import CASES, NOT_COVERED, TRAINED
from keras_fit.test_behaviors import differences
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

WORKERS = {"one_device": 1, "mirrored2": 1, "multi_worker": 2, "horovod": 2}
STRATEGIES = ("one_device", "mirrored2", "multi_worker", HOROVOD)

pytestmark = pytest.mark.slow


class Trained:
    """What the trainings of each engine left, which does all of them when it is first asked for."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self._found: dict[str, list[dict[str, Any]]] = {}

    def of(self, engine: str) -> list[dict[str, Any]]:
        """By worker."""
        if engine not in self._found:
            directory, launch = self.root / engine, support.LAUNCH.get(engine)
            support.run_module("keras_fit.callback_cases", engine, directory, launch=launch, timeout=900).check()
            ranks = range(WORKERS.get(engine, 1))
            self._found[engine] = [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in ranks]
        return self._found[engine]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("callbacks"))


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        pytest.param(strategy, case, marks=HOROVOD.marks if strategy == "horovod" else ())
        for strategy in WORKERS
        for case in TRAINED[strategy]
    ],
)
def test_hooks_logs_and_weights_are_those_of_fit(trained: Trained, strategy: str, case: str) -> None:
    (expected,) = (found[case] for found in trained.of("fit"))
    for found in trained.of(strategy):
        different = differences(expected, found[case])
        assert not different, "\n".join(different)
    assert expected["calls"] or case == "of_batches"


def files_in(directory: pathlib.Path) -> dict[str, Any]:
    """What Keras's callbacks wrote, by file."""
    found: dict[str, Any] = {}
    for path in directory.iterdir():
        if path.suffix == ".keras":
            found[path.name] = keras.models.load_model(path).get_weights()
        elif path.suffix == ".h5":
            model = classifier()
            model.load_weights(path)
            found[path.name] = model.get_weights()
        else:
            rows = csv.DictReader(path.read_text().splitlines())
            found[path.name] = [{name: float(value) for name, value in row.items()} for row in rows]
    return found


def scalars(directory: pathlib.Path) -> dict[str, Any]:
    found = {}
    for part in ("train", "validation"):
        events = EventAccumulator(str(directory / part)).Reload()
        for tag in events.Tags()["tensors"]:
            found[f"{part}/{tag}"] = [(e.step, tf.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
    return found


def posted(directory: pathlib.Path) -> list[Any]:
    """Address and logs of each epoch, which the chief alone posts."""
    assert [path.name for path in directory.iterdir()] == ["noted-0.jsonl"]
    notes = [json.loads(line) for line in (directory / "noted-0.jsonl").read_text().splitlines()]
    assert len(notes) == 3
    return [(address, json.loads(urllib.parse.parse_qs(body)["data"][0])) for address, body in notes]


LEFT = {
    **dict.fromkeys(["of_epochs/best", "of_epochs/csv", "of_batches/checkpoints"], files_in),
    **dict.fromkeys(["of_epochs/tensorboard", "of_batches/tensorboard"], scalars),
    "of_epochs/remote": posted,
}


@pytest.mark.parametrize("what", LEFT)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_callbacks_leave_behind_is_what_they_leave_in_fit(trained: Trained, strategy: str, what: str) -> None:
    trained.of("fit"), trained.of(strategy)
    expected, found = (LEFT[what](trained.root / engine / what) for engine in ("fit", strategy))
    assert expected and not differences(expected, found), "\n".join(differences(expected, found))


def test_every_callback_of_keras_is_in_a_case_or_named_as_left_out() -> None:
    public = {name for name in dir(keras.callbacks) if isinstance(getattr(keras.callbacks, name), type)}
    assert public == {name for case in CASES.values() for name in case.covers} | set(NOT_COVERED)
