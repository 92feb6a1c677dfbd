"""TensorFlow's chatter stays away, and what goes wrong does not; what Keras may not need comes when it is used."""

from __future__ import annotations

import re
import sys

import pytest
from support import run_command, run_python

_IMPORT = """
import os
from tfdist.telemetry.console.quiet import quiet_import, quiet_tensorflow
quiet_tensorflow(os.environ)
with quiet_import(os.environ):
    {body}
"""
_FIRST_OP = """
import tensorflow as tf
tf.config.list_physical_devices()
tf.function(lambda x: x @ x)(tf.ones((2, 2)))
tf.distribute.MirroredStrategy()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "body", "status", "stderr"),
    [
        (None, "import tensorflow", 0, r"\Z"),
        ("0", "import tensorflow", 0, r"\.cc:\d+\] "),  # where in TensorFlow's code a line comes from
        (None, "import tensorflow.no_such_module", 1, r"\ATraceback(.|\n)*ModuleNotFoundError"),
    ],
)
def test_a_user_hears_tensorflow_only_as_asked_or_where_its_import_fails(
    level: str | None, body: str, status: int, stderr: str
) -> None:
    environment = {"TF_CPP_MIN_LOG_LEVEL": level, "CUDA_VISIBLE_DEVICES": None}
    done = run_python(["-c", _IMPORT.format(body=body) + _FIRST_OP], env=environment)
    assert (done.status, done.stdout) == (status, "") and re.search(stderr, done.stderr), done.outputs()
    assert level or not re.search(r"absl::InitializeLog", done.stderr)


def test_a_process_without_standard_error_still_imports() -> None:
    script = _IMPORT.format(body="print('imported')")
    done = run_command(["bash", "-c", '"$0" -c "$1" 2>&-', sys.executable, script], env={"TF_CPP_MIN_LOG_LEVEL": None})
    assert (done.status, done.stdout) == (0, "imported\n")


@pytest.mark.slow
def test_keras_imports_what_draws_and_tables_when_it_uses_them() -> None:
    """Both are imported by Keras where they are installed, for half a second each."""
    script = """
import sys
from tfdist.telemetry.console.quiet import defer_imports
with defer_imports():
    import keras
from keras.src.trainers.data_adapters.array_slicing import ARRAY_TYPES
assert isinstance(keras.ops.convert_to_numpy([2.0]), ARRAY_TYPES) and not isinstance(2, ARRAY_TYPES)
assert not {"pandas", "matplotlib"} & sys.modules.keys()
galleries = [sys.modules[f"keras.src.visualization.plot_{name}_gallery"] for name in ("image", "bounding_box")]
used = galleries[0].plt.Figure, galleries[1].patches.Patch
from matplotlib import figure, patches
assert used == (figure.Figure, patches.Patch)
import pandas
table = pandas.DataFrame({"x": [1.0, 3.0]})
assert isinstance(table, ARRAY_TYPES) and isinstance(table.x, ARRAY_TYPES)
model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
assert model.predict(table, verbose=0).tolist() == [[1.0], [3.0]]
"""
    done = run_python(["-c", script], env={"KERAS_BACKEND": "tensorflow"})
    assert done.status == 0, done.outputs()
