"""`--mode=predict`: each example once, in its own order, on any number of workers and after a kill."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from support import REPOSITORY, run_python

pytestmark = pytest.mark.slow

MODULE = """\
import keras
import numpy as np

ROWS = np.random.default_rng(0).normal(size=(101, 6)).astype(np.float32)

def rows():
    return ROWS

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


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, keras.Model, np.ndarray]:
    """A directory with the module, the configuration and some weights; the model and the rows."""
    folder = tmp_path_factory.mktemp("used")
    (folder / "used.py").write_text(MODULE)
    (folder / "used.gin").write_text(GIN)
    names: dict[str, Any] = {}
    exec(MODULE, names)
    model = names["several"]()
    model.save(folder / "weights.keras")
    names["single"]().save(folder / "single.keras")
    return folder, model, names["ROWS"]


def predict(folder: Path, run_dir: str, *settings: str, program: tuple[str, ...] = ("-m", "tfdist.main")) -> Any:
    given = [f"--gin_param={each}" for each in settings]
    arguments = [*program, "--mode=predict", "--gin_file=used.gin", f"--run_dir={run_dir}", *given]
    return run_python(arguments, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, timeout=300)


def lines(folder: Path) -> list[dict[str, Any]]:
    found = sorted((folder / "predictions").glob("part-*.jsonl"))
    return [json.loads(line) for file in found for line in file.read_text().splitlines()]


def check(folder: Path, model: keras.Model, rows: np.ndarray) -> None:
    found = lines(folder)
    assert [each["example"] for each in found] == list(range(len(rows)))
    for name, expected in model(rows).items():
        np.testing.assert_allclose([each[name] for each in found], np.asarray(expected), atol=1e-6)


def test_every_example_is_there_once_and_in_order(used: tuple[Path, keras.Model, np.ndarray]) -> None:
    folder, model, rows = used
    predict(folder, "alone").check()
    check(folder / "alone", model, rows)
    names = sorted(path.name for path in (folder / "alone" / "predictions").iterdir())
    assert names == [*(f"part-{i:05d}.jsonl" for i in range(4)), "predictions.json"]
    summary = json.loads((folder / "alone" / "predictions" / "predictions.json").read_text())
    assert summary["done"] and summary["num_examples"] == 101
    again = predict(folder, "alone").check()
    assert "101 examples are predicted already" in again.stdout + again.stderr
    check(folder / "alone", model, rows)
    predict(folder, "alone", "predict.data = @used.labeled").check()  # other data: anew
    check(folder / "alone", model, rows)


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
def test_workers_and_replicas_share_the_examples(
    used: tuple[Path, keras.Model, np.ndarray], launch: list[str], strategy: str
) -> None:
    folder, model, rows = used
    name = strategy.split(".")[0]
    settings = [f"from tfdist.strategies import {name}", f"predict.strategy = @{strategy}"]
    program = (*launch, "--module=tfdist.main", "--") if launch else ("-m", "tfdist.main")
    predict(folder, name, *settings, program=program).check()
    check(folder / name, model, rows)


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


def test_a_prediction_that_was_killed_goes_on_behind_its_last_whole_file(
    used: tuple[Path, keras.Model, np.ndarray],
) -> None:
    folder, model, rows = used
    assert predict(folder, "killed", program=("-c", KILLED)).status == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "killed" / "predictions").glob("part-*")}
    assert list(before) == ["part-00000.jsonl"]
    ended = predict(folder, "killed").check()
    assert "32 examples are predicted already" in ended.stdout + ended.stderr
    check(folder / "killed", model, rows)
    assert (folder / "killed" / "predictions" / "part-00000.jsonl").stat().st_mtime_ns == before["part-00000.jsonl"]


def test_files_of_other_formats_hold_the_same(used: tuple[Path, keras.Model, np.ndarray]) -> None:
    import pyarrow.parquet

    folder, model, rows = used
    expected = {name: np.asarray(value) for name, value in model(rows).items()}
    everything = "predict.examples_per_file = 1000"
    predict(folder, "npz", everything, "predict.format = 'npz'").check()
    with np.load(folder / "npz" / "predictions" / "part-00000.npz") as held:
        np.testing.assert_array_equal(held["example"], np.arange(101))
        for name, value in expected.items():
            np.testing.assert_allclose(held[name], value, atol=1e-6)
    predict(folder, "parquet", everything, "predict.format = 'parquet'").check()
    table = pyarrow.parquet.read_table(folder / "parquet" / "predictions" / "part-00000.parquet")
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(table[name].to_pylist()), value, atol=1e-6)


def test_a_compiled_model_and_wrong_settings(used: tuple[Path, keras.Model, np.ndarray]) -> None:
    folder, _, rows = used
    settings = ["predict.model = @used.compiled", "predict.weights = 'single.keras'", "predict.data = @used.labeled"]
    predict(folder, "compiled", *settings).check()
    model = keras.models.load_model(folder / "single.keras")
    np.testing.assert_allclose([each["output"] for each in lines(folder / "compiled")], model(rows), atol=1e-6)
    for wrong, words in [
        ("predict.format = 'csv'", "write one of 'jsonl', 'npz', 'parquet'"),
        ("predict.weights = 'no.keras'", "There is no file predict.weights = 'no.keras'"),
        ("predict.weights = None", "Write predict.weights = 'FILE'".lower()),
        ("predict.examples_per_file = 0", "predict.examples_per_file is 0"),
        ("predict.data = @used.narrow", "do not fit the data"),
    ]:
        refused = predict(folder, "wrong", wrong)
        assert refused.status == 2 and words in refused.stderr.lower() + refused.stderr, refused.outputs()
