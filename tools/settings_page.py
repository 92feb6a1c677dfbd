#!/usr/bin/env python3
"""Writes the tables of all settings into docs/configuration.md, from what the settings declare.

python tools/settings_page.py
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from marked_page import fill_page  # noqa: E402 (found only now)

from tfdist.checkpoint.policy import CheckpointPolicy  # noqa: E402
from tfdist.serving.serving_settings import ExportSettings, PredictSettings  # noqa: E402
from tfdist.settings.declaration import Settings, format_default  # noqa: E402
from tfdist.training.run.train_settings import EvaluateSettings, TrainedSettings, TrainSettings  # noqa: E402
from tfdist.tuning.find_rate import FindRateSettings  # noqa: E402
from tfdist.tuning.tune_settings import TuneSettings  # noqa: E402

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


def render_page() -> str:
    """The page's text with the tables between its marks."""
    parts = [
        f"### `{part.NAME}`\n\n{(part.__doc__ or '').strip().splitlines()[0]}\n\n{format_table(part)}" for part in PARTS
    ]
    return fill_page(PAGE, BEGIN, END, "\n".join(parts))


def format_table(part: type[Settings]) -> str:
    """A row for each setting: required ones first, the others as they are declared; what evaluate has, by name."""
    declared = part.declarations()
    repeats = issubclass(part, TrainedSettings) and part is not EvaluateSettings
    shared = {field.name for field in dataclasses.fields(TrainedSettings)} if repeats else set()
    resumes = any(about.may_change for about in declared.values())
    columns = ["setting", "default", "value", *(["on resume"] if resumes else []), "meaning"]
    fields = sorted(dataclasses.fields(part), key=lambda field: format_default(field) is not None)
    names = ", ".join(f"`{field.name}`" for field in fields if field.name in shared)
    fields = [field for field in fields if field.name not in shared]
    rows = [columns, ["---"] * len(columns)]
    for field in fields:
        about = declared[field.name]
        default = "required" if (written := format_default(field)) is None else f"`{written}`"
        value = about.check.wanted + (f" ({about.unit})" if about.unit else "")
        may_change = ["may change" if about.may_change else ""] if resumes else []
        rows.append([f"`{field.name}`", default, value, *may_change, about.meaning])
    table = "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)
    return f"As `evaluate`: {names}.\n\n{table}" if names else table


if __name__ == "__main__":
    PAGE.write_text(render_page())
