"""TensorFlow's chatter stays away, and nothing else does."""

from __future__ import annotations

import os
import re
import sys

import pytest
from support import Finished, run_command, run_python

from tfdist.telemetry.console.quiet import passing_lines, quiet_import, quiet_tensorflow

_IMPORT = """
import os, sys, warnings
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
_ABSL_WARNING = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
_CHATTER = (
    _ABSL_WARNING.encode(),
    b"I0000 00:00:1795257599.776092    5261 port.cc:153] oneDNN custom operations are on. You may see ...\n",
    b"2026-01-31 10:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow ...\n",
)
_WARNING = b"W0000 00:00:1795257599.776092    5261 some_file.cc:153] Could not find TensorRT\n"
_ERROR = b"2026-01-31 10:00:00.123456: E external/xla/xla/x.cc:467] Something broke\n"
_FACTORY = b"E0000 00:00:1795257599.776092    5261 cuda_fft.cc:467] Unable to register cuFFT factory: Attempting\n"
_FATAL = b"F0000 00:00:1795257599.776092    5261 cpu.cc:99] The TensorFlow library was compiled to use AVX\n"
_OTHER = b"Traceback (most recent call last):\n"


def _run(body: str, after: str = "", **environment: str) -> Finished:
    script = _IMPORT.format(body=body) + after
    return run_python(["-c", script], env={"TF_CPP_MIN_LOG_LEVEL": None, "CUDA_VISIBLE_DEVICES": None} | environment)


@pytest.mark.slow
def test_importing_tensorflow_and_the_first_operations_say_nothing() -> None:
    done = _run("import tensorflow", _FIRST_OP)
    assert (done.status, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_user_who_set_the_level_hears_tensorflow() -> None:
    done = _run("import tensorflow", TF_CPP_MIN_LOG_LEVEL="0")
    assert done.status == 0
    assert re.search(r"\.cc:\d+\] ", done.stderr)  # where in TensorFlow's code a line comes from


def test_a_warning_during_the_import_is_shown() -> None:
    done = _run("warnings.warn('look here')")
    assert "UserWarning: look here" in done.stderr


@pytest.mark.slow
def test_an_import_that_fails_shows_its_traceback() -> None:
    done = _run("import tensorflow.no_such_module")
    assert done.status == 1
    assert "ModuleNotFoundError" in done.stderr
    assert _ABSL_WARNING not in done.stderr


def test_a_process_without_standard_error_still_imports() -> None:
    script = _IMPORT.format(body="print('imported')")
    done = run_command(["bash", "-c", '"$0" -c "$1" 2>&-', sys.executable, script], env={"TF_CPP_MIN_LOG_LEVEL": None})
    assert (done.status, done.stdout) == (0, "imported\n")


@pytest.mark.parametrize(
    ("level", "shown"),
    [(1, [_WARNING, _ERROR, _FATAL, _OTHER]), (2, [_ERROR, _FATAL, _OTHER]), (3, [_FATAL, _OTHER])],
)
def test_the_level_decides_what_passes(level: int, shown: list[bytes]) -> None:
    assert list(passing_lines([*_CHATTER, _WARNING, _ERROR, _FACTORY, _FATAL, _OTHER], level)) == shown


def test_the_users_level_is_kept_and_without_one_nothing_is_filtered() -> None:
    environment = {"TF_CPP_MIN_LOG_LEVEL": "1"}
    quiet_tensorflow(environment)
    assert environment == {"TF_CPP_MIN_LOG_LEVEL": "1"}
    before = os.fstat(2)
    with quiet_import({}):
        assert os.fstat(2) == before
