"""`--mode=predict`: each example once, in its own order, on any number of workers and after a kill."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyarrow import parquet
from support import REPOSITORY, Finished, run_python

from tfdist.errors import UserError
from tfdist.serving.inputs import name_outputs
from tfdist.serving.prediction_files import WRITERS, PredictionFiles

pytestmark = pytest.mark.slow

MODULE = """\
import keras
import numpy as np

ROWS = np.random.default_rng(0).normal(size=(101, 6)).astype(np.float32)

def rows():
    return ROWS

def alone():
    import tensorflow as tf
    return tf.data.Dataset.from_tensor_slices(ROWS)

def narrow():
    return ROWS[:, :5]

def labeled():
    return ROWS, np.zeros(101, np.int32)

def several():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh")(inputs)
    wide = keras.layers.Reshape((2, 3))(keras.layers.Dense(6)(x))
    return keras.Model(inputs, {"wide": wide, "one": keras.layers.Dense(1)(x)})

def single():
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(3)(inputs))

def summarized():
    x = keras.layers.Dense(3)(inputs := keras.Input((6,)))
    return keras.Model(inputs, {"own": x, "mean": keras.ops.mean(x)})

def compiled():
    model = single()
    model.compile("sgd", "mse")
    return model
"""
GIN = """\
from __gin__ import dynamic_registration
import keras
import used
from tfdist.strategies import one_device
from tfdist.tasks import supervised

predict.model = @used.several
predict.strategy = @one_device.OneDevice()
predict.data = @used.rows
predict.global_batch_size = 8
predict.weights = 'weights.keras'
predict.examples_per_file = 32
"""


@dataclasses.dataclass
class Used:
    """A directory with the module, the configuration and some weights; the model and the rows."""

    folder: Path
    model: keras.Model
    rows: np.ndarray

    def predict(self, run_dir: str, *settings: str, program: Sequence[str] = ("-m", "tfdist.main")) -> Finished:
        arguments = [*program, *arguments_for(run_dir, *settings)]
        return run_python(arguments, cwd=self.folder, env={"PYTHONPATH": str(REPOSITORY)}, timeout=300)

    def lines(self, run_dir: str) -> list[dict[str, Any]]:
        found = sorted((self.folder / run_dir / "predictions").glob("part-*.jsonl"))
        return [json.loads(line) for file in found for line in file.read_text().splitlines()]

    def check(self, run_dir: str) -> None:
        found = self.lines(run_dir)
        assert [each["example"] for each in found] == list(range(len(self.rows)))
        for name, expected in self.model(self.rows).items():
            np.testing.assert_allclose([each[name] for each in found], np.asarray(expected), atol=1e-6)


def arguments_for(run_dir: str, *settings: str) -> list[str]:
    given = [f"--gin_param={each}" for each in settings]
    return ["--mode=predict", "--gin_file=used.gin", f"--run_dir={run_dir}", *given]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    folder = tmp_path_factory.mktemp("used")
    (folder / "used.py").write_text(MODULE)
    (folder / "used.gin").write_text(GIN)
    names: dict[str, Any] = {}
    exec(MODULE, names)
    model = names["several"]()
    model.save(folder / "weights.keras")
    names["single"]().save(folder / "single.keras")
    return Used(folder, model, names["ROWS"])


@pytest.fixture
def predict_here(
    used: Used, answer: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Finished]:
    """Predicts in this process."""
    monkeypatch.chdir(used.folder)
    return lambda run_dir, *settings: answer(*arguments_for(run_dir, *settings))


KILLED = """\
import os, signal, sys
from tfdist.main import load_roots, main
load_roots(False)
from tfdist.serving.predicting import Predictor
call, calls = Predictor.__call__, []
def dies(self, batch):
    calls.append(1)
    if len(calls) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, batch)
Predictor.__call__ = dies
main(sys.argv[1:])
"""


def test_every_example_is_there_once_and_in_order_after_a_kill_too(used: Used) -> None:
    written = used.folder / "alone" / "predictions"
    assert used.predict("alone", program=("-c", KILLED)).status == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in written.glob("part-*")}
    assert list(before) == ["part-00000.jsonl"]
    for done in (32, 101):
        ended = used.predict("alone").check()
        assert f"{done} examples are predicted already" in ended.stdout + ended.stderr
        used.check("alone")
        assert (written / "part-00000.jsonl").stat().st_mtime_ns == before["part-00000.jsonl"]
    names = sorted(path.name for path in written.iterdir())
    assert names == [*(f"part-{i:05d}.jsonl" for i in range(4)), "predictions.json"]
    summary = json.loads((written / "predictions.json").read_text())
    assert summary["done"] and summary["num_examples"] == 101
    used.predict("alone", "predict.data = @used.labeled").check()  # other data: anew
    used.check("alone")


@pytest.mark.parametrize(
    ("launch", "strategy"),
    [
        ([], "mirrored.Mirrored(num_cpu_devices=3)"),
        (["-m", "tfdist.launch", "--workers=2"], "multi_worker.MultiWorker()"),
        pytest.param(
            ["-m", "tfdist.launch", "--workers=2", "--launcher=horovod"], "horovod.Horovod()", marks=pytest.mark.horovod
        ),
    ],
    ids=["mirrored", "multi_worker", "horovod"],
)
def test_workers_and_replicas_share_the_examples(used: Used, launch: list[str], strategy: str) -> None:
    name = strategy.split(".")[0]
    settings = [f"from tfdist.strategies import {name}", f"predict.strategy = @{strategy}"]
    program = (*launch, "--module=tfdist.main", "--") if launch else ("-m", "tfdist.main")
    used.predict(name, *settings, program=program).check()
    used.check(name)


def test_files_of_other_formats_hold_the_same(used: Used, predict_here: Callable[..., Finished]) -> None:
    empty = parquet.read_table(io.BytesIO(WRITERS["parquet"]({"none": np.zeros((2, 0))})))
    assert empty["none"].to_pylist() == [[], []]
    expected = {name: np.asarray(value) for name, value in used.model(used.rows).items()}
    everything = "predict.examples_per_file = 1000"
    predict_here("npz", everything, "predict.format = 'npz'", "predict.data = @used.alone").check()
    predict_here("parquet", everything, "predict.format = 'parquet'").check()
    table = parquet.read_table("parquet/predictions/part-00000.parquet")
    with np.load("npz/predictions/part-00000.npz") as held:
        np.testing.assert_array_equal(held["example"], np.arange(101))
        for name, value in expected.items():
            np.testing.assert_allclose(held[name], value, atol=1e-6)
            np.testing.assert_allclose(np.array(table[name].to_pylist()), value, atol=1e-6)


def test_outputs_of_two_sizes_are_one_message(tmp_path: Path) -> None:
    written = PredictionFiles(str(tmp_path), "jsonl", {}, steps_per_file=2)
    written.add(0, {"tokens": np.zeros((2, 3))}, first=0, is_last=False)
    with pytest.raises(UserError, match=r"'tokens' is of \[3\] and \[4\] for .*one size. Pad the data to one length"):
        written.add(1, {"tokens": np.zeros((2, 4))}, first=2, is_last=True)


def test_a_compiled_model_predicts(used: Used, predict_here: Callable[..., Finished]) -> None:
    settings = [
        "predict.model = @used.compiled",
        "predict.weights = 'single.keras'",
        "predict.data = {'a': @used.labeled, 'b': @used.narrow}",
    ]
    predict_here("compiled", *settings).check()
    expected = keras.models.load_model("single.keras")(used.rows)
    np.testing.assert_allclose([each["output"] for each in used.lines("compiled")], expected, atol=1e-6)
    predict_here("compiled", *settings, "predict.precision = 'bfloat16'").check()  # other settings: anew
    rounded = np.array([each["output"] for each in used.lines("compiled")])
    assert 1e-5 < np.abs(rounded - expected).max() < 0.1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("predict.format = 'csv'", "write one of 'jsonl', 'npz', 'parquet'"),
        ("predict.weights = 'no.keras'", "There is no file predict.weights = 'no.keras'"),
        ("predict.weights = None", "rite predict.weights = 'FILE'"),
        ("predict.examples_per_file = 0", "predict.examples_per_file is 0"),
        ("predict.data = @used.narrow", "do not fit the data"),
        (
            "predict.model = @used.summarized\npredict.weights = 'single.keras'",
            "'mean' is of [], and does not have a row",
        ),
    ],
)
def test_wrong_settings_are_one_message(predict_here: Callable[..., Finished], wrong: str, words: str) -> None:
    refused = predict_here("wrong", *wrong.splitlines())
    assert refused.status == 2 and words in refused.stderr, refused.outputs()


def test_outputs_of_16_bits_become_32() -> None:
    outputs = keras.layers.Dense(2, dtype="bfloat16")(inputs := keras.Input((3,)))
    found = name_outputs(keras.Model(inputs, outputs), np.ones((1, 3), np.float32))
    assert found["output"].dtype == "float32"
