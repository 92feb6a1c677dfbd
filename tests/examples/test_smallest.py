"""The experiment that docs/your_own_experiment.md begins with: some five settings, and it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import REPOSITORY, run_python

FOLDER = REPOSITORY / "examples/smallest"


@pytest.mark.slow
def test_the_smallest_experiment_learns(tmp_path: Path) -> None:
    run_python(["-m", "tfdist.main", "--gin_file=smallest.gin", f"--run_dir={tmp_path}"], cwd=FOLDER).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["train_metrics"]["accuracy"] > 0.9


def test_the_page_shows_the_files_as_they_are() -> None:
    page = (REPOSITORY / "docs/your_own_experiment.md").read_text()
    shown = {line.strip() for line in page.splitlines()}
    for name in ("smallest.py", "smallest.gin"):
        lines = [line.strip() for line in (FOLDER / name).read_text().splitlines()]
        wanted = [line for line in lines if line and not line.startswith(("#", '"""'))]
        assert not set(wanted) - shown
    assert sum(line.startswith("train.") for line in wanted) <= 5
