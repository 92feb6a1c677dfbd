#!/usr/bin/env python3
"""Writes the tables of all settings into docs/configuration.md, from what the settings declare.

python tools/settings_page.py
"""

from __future__ import annotations

import os
import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from marked_page import filled  # noqa: E402 (found only now)

from tfdist.checkpoint.policy import CheckpointPolicy  # noqa: E402
from tfdist.serving.settings import ExportSettings, PredictSettings  # noqa: E402
from tfdist.settings import page  # noqa: E402
from tfdist.training.run.settings import EvaluateSettings, TrainSettings  # noqa: E402
from tfdist.tuning.find_rate import FindRateSettings  # noqa: E402
from tfdist.tuning.settings import TuneSettings  # noqa: E402

PAGE = REPOSITORY / "docs" / "configuration.md"
BEGIN, END = "<!-- the settings begin -->", "<!-- the settings end -->"
PARTS = (
    TrainSettings,
    CheckpointPolicy,
    EvaluateSettings,
    PredictSettings,
    ExportSettings,
    FindRateSettings,
    TuneSettings,
)


def written() -> str:
    """The page's text with the tables between its marks."""
    return filled(PAGE, BEGIN, END, page.text(PARTS))


if __name__ == "__main__":
    PAGE.write_text(written())
