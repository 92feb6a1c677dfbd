"""TensorFlow's chatter stays away, and what goes wrong does not."""

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
