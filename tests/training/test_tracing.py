"""A process may train again and again, and TensorFlow does not warn that functions are traced too often."""

from __future__ import annotations

import logging
import pathlib

import pytest
from training.trainings import run


@pytest.mark.slow
def test_many_trainings_in_one_process_bring_no_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tensorflow"):
        for index in range(6):
            run(tmp_path / str(index), epochs=1)
    assert "retracing" not in caplog.text
