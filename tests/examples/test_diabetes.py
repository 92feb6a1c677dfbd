"""The example of docs/your_own_experiment.md: from both directories it says, and under strategies with two replicas."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from support import REPOSITORY, run_python

pytestmark = pytest.mark.slow

FOLDER = REPOSITORY / "examples/diabetes"


@pytest.mark.parametrize(
    ("cwd", "gin_file"), [(REPOSITORY, "examples/diabetes/diabetes.gin"), (FOLDER, "diabetes.gin")], ids=["root", "own"]
)
def test_it_validates_from_the_repository_and_from_its_own_directory(cwd: Path, gin_file: str) -> None:
    told = run_python(["-m", "tfdist.main", f"--gin_file={gin_file}", "--mode=validate"], cwd=cwd).check()
    assert told.stdout.splitlines()[-1] == "valid"
    assert "353 examples" in told.stdout and "89 examples" in told.stdout
    assert "metrics: loss, coverage" in told.stdout


def test_it_learns_and_two_replicas_learn_the_same(tmp_path: Path) -> None:
    mirrored = ["--gin_file=configs/strategies/mirrored.gin", "--gin_param=mirrored.Mirrored.num_cpu_devices = 2"]
    results = []
    for name, more in {"one": [], "two": mirrored}.items():
        arguments = ["--gin_file=examples/diabetes/diabetes.gin", *more, f"--run_dir={tmp_path / name}"]
        run_python(["-m", "tfdist.main", *arguments], cwd=REPOSITORY).check()
        results.append(json.loads((tmp_path / name / "result.json").read_text()))
    one, two = results
    assert one["eval_metrics"]["loss"] < 0.16 and 0.5 < one["eval_metrics"]["coverage"] < 0.95
    assert one["steps"] < 720  # EarlyStopping ended it
    assert (one["num_replicas"], two["num_replicas"], two["steps"]) == (1, 2, one["steps"])
    assert two["eval_metrics"] == pytest.approx(one["eval_metrics"], rel=1e-3)


def test_the_users_module_imports_nothing_of_tfdist() -> None:
    tree = ast.parse((FOLDER / "diabetes.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"keras", "numpy", "sklearn.datasets"}
