"""`--mode=export`: other programs compute what the model does, and the report says how exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_wine
from support import REPOSITORY, Finished, run_python

from tfdist.data.sources.sklearn_sets import load_digits
from tfdist.serving import exporting

DIGITS = "--gin_file=configs/experiments/digits.gin"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    arguments = ["-m", "tfdist.main", DIGITS, "--gin_param=train.epochs = 3", f"--run_dir={run_dir}"]
    run_python(arguments, cwd=REPOSITORY).check()
    return run_dir


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    """A copy of the run, in every format."""
    run_dir = trained.with_name("exported")
    shutil.copytree(trained, run_dir)
    export(run_dir, "export.formats = ['saved_model', 'litert', 'onnx']").check()
    return run_dir


def export(run_dir: Path, *settings: str) -> Any:
    given = [f"--gin_param={each}" for each in settings]
    return run_python(["-m", "tfdist.main", "--mode=export", f"--run_dir={run_dir}", *given], cwd=REPOSITORY)


def report_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "export" / "report.json").read_text())


def test_every_format_computes_what_the_model_does(exported: Path) -> None:
    report = report_of(exported)
    assert report["num_examples"] == 64 and report["weights"] == str(exported / "export/model.keras")
    assert set(report["exports"]) == {"saved_model", "litert", "onnx"}
    for kind, found in report["exports"].items():
        assert found["largest_difference"]["output"] < 1e-4, kind
        assert found["same_class"]["output"] == 1.0 and found["bytes"] > 100_000
        assert Path(found["path"]).exists()


def test_int8_is_smaller_and_its_difference_is_said(trained: Path, exported: Path) -> None:
    plain = report_of(exported)["exports"]["litert"]
    export(trained, "export.formats = ['saved_model', 'onnx', 'litert']", "export.quantize = 'int8'").check()
    report = report_of(trained)
    small = report["exports"]["litert"]
    for kind in ("saved_model", "onnx"):
        assert report["exports"][kind]["same_class"]["output"] > 0.95
    assert report["quantized"] == "int8" and small["bytes"] < plain["bytes"]
    assert plain["largest_difference"]["output"] < small["largest_difference"]["output"] < 1.0
    assert small["same_class"]["output"] > 0.95


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("export.formats = []", "write a list of 'saved_model', 'litert' and 'onnx'"),
        ("export.formats = ['h5']", "write a list of 'saved_model', 'litert' and 'onnx'"),
        ("export.quantize = 'int2'", "write one of 'int8', or None"),
        ("export.weights = 7", "has no checkpoint of step 7"),
    ],
)
def test_wrong_settings_are_one_message(
    trained: Path, answer: Callable[..., Finished], setting: str, words: str
) -> None:
    refused = answer("--mode=export", f"--run_dir={trained}", f"--gin_param={setting}")
    assert refused.status == 2 and words in refused.stderr, refused.outputs()


def ask(run_dir: Path, path: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The answer of the example's server to a request."""
    saved_model = str(run_dir / "export/saved_model")
    program = [sys.executable, str(REPOSITORY / "examples/serving/serve.py"), saved_model, "--port=0"]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]  # printed once it listens
        body = json.dumps(inputs).encode()
        request = urllib.request.Request(f"{address}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    finally:
        server.terminate()
        server.wait(30)


def test_the_server_of_the_documentation_answers(exported: Path) -> None:
    images, _ = load_digits(split="test")
    found = ask(exported, "/predict", {"inputs": images[:5].tolist()})["output"]
    expected = keras.models.load_model(exported / "export" / "model.keras")(images[:5])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def wines() -> dict[str, list[float]]:
    """A wine of the first cultivar and one of the last, by column."""
    data = load_wine()
    columns = zip(data.feature_names, data.data[[0, -1]].T, strict=True)
    return {name.replace("/", "_"): column.tolist() for name, column in columns}


TEXTS = {"text": ["The film was dull all in all.", "Her new song is really a delight from start to end."]}


@pytest.mark.parametrize(
    ("script", "gin_file", "inputs", "classes"),
    [
        ("serving/make_reviews.py", str(REPOSITORY / "examples/serving/sentiment.gin"), TEXTS, [0, 1]),
        ("files/prepare_tables.py", "tfdist:experiments/wine_parquet.gin", wines(), [0, 2]),
    ],
    ids=["sentiment", "table"],
)
def test_a_classifier_is_trained_exported_and_served(
    tmp_path: Path, script: str, gin_file: str, inputs: dict[str, Any], classes: list[int]
) -> None:
    run_python([REPOSITORY / "examples" / script], cwd=tmp_path).check()
    path = {"PYTHONPATH": str(REPOSITORY)}
    for arguments in ([f"--gin_file={gin_file}"], ["--mode=export"]):
        run_python(["-m", "tfdist.main", *arguments, "--run_dir=run"], env=path, cwd=tmp_path).check()
    found = report_of(tmp_path / "run")["exports"]["saved_model"]["raw"]
    assert max(found["largest_difference"].values()) < 1e-5 and set(found["inputs"]) == inputs.keys()
    (outputs,) = ask(tmp_path / "run", "/predict_raw", inputs).values()
    assert np.argmax(outputs, axis=1).tolist() == classes


HEADS = """
import keras
import numpy as np


def load(num_examples=32):
    x = np.random.default_rng(0).normal(size=(num_examples, 4)).astype(np.float32)
    return {"1st-week": x[:, :2], "class": x[:, 2:]}, {"z_head": x[:, :3], "a_head": x[:, :2]}


def build():
    inputs = {"1st-week": keras.Input((2,), name="week"), "class": keras.Input((2,), name="kind")}
    x = keras.layers.Concatenate()([*inputs.values()])
    heads = [keras.layers.Dense(3, name="z_head")(x), keras.layers.Dense(2, name="a_head")(x)]
    return keras.Model(inputs, heads)
"""
HEADS_GIN = """
import heads
train.model = @heads.build
train.train_data = @heads.load
train.eval_data = @heads.load
train.task = @tfdist.Supervised()
tfdist.Supervised.loss = {'z_head': 'mse', 'a_head': 'mse'}
train.optimizer = 'sgd'
train.epochs = 1
train.global_batch_size = 16
"""


def test_names_that_are_no_identifiers_and_outputs_in_a_list_are_compared_with_their_own(tmp_path: Path) -> None:
    (tmp_path / "heads.py").write_text(HEADS)
    (tmp_path / "heads.gin").write_text(HEADS_GIN)
    path = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    run_python(["-m", "tfdist.main", "--gin_file=heads.gin", "--run_dir=run"], env=path, cwd=tmp_path).check()
    shutil.move(tmp_path / "run" / "export" / "model.keras", tmp_path / "model.keras")
    shutil.rmtree(tmp_path / "run" / "export")
    settings = ["export.formats = ['saved_model', 'litert', 'onnx']", "export.weights = 'model.keras'"]
    given = ["--mode=export", "--run_dir=run", *(f"--gin_param={each}" for each in settings)]
    run_python(["-m", "tfdist.main", *given], env=path, cwd=tmp_path).check()
    for kind, found in report_of(tmp_path / "run")["exports"].items():
        assert max(found["largest_difference"].values()) < 1e-4, kind


class Summarized(keras.Model):
    def call(self, x: Any) -> dict[str, Any]:
        return {"mean": keras.ops.mean(x), "sign": tf.where(x[:, 0] > 0, "plus", "minus")}


def test_texts_and_one_number_for_all_examples_are_compared(tmp_path: Path) -> None:
    model, x = Summarized(), np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    expected = {name: keras.ops.convert_to_numpy(value) for name, value in model(x).items()}
    path = str(tmp_path / "saved")
    exporting._write_export(model, "saved_model", path, tf.TensorSpec((None, 4)), raw=None, quantize=False)
    given = exporting._run_in_process("saved_model", path, {"inputs": x}, str(tmp_path))
    assert exporting._compare(expected, given)["largest_difference"] == {"mean": 0, "sign": 0}
    given["sign"][3] = b"none"
    assert exporting._compare(expected, given)["largest_difference"]["sign"] == 1
