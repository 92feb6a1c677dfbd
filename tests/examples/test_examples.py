"""The examples: from both directories that a page says, and on two replicas or workers as on one device."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
from support import REPOSITORY, run_python

FOLDER = REPOSITORY / "examples/diabetes"
SMALLEST = REPOSITORY / "examples/smallest"
RATE = "tfdist.CosineDecay.initial_learning_rate=0.01"  # at 0.05 rounding grows to 3e-4 in 24 steps
RESNET = ["tfdist.build_resnet.filters=(16,32)", "tfdist.build_resnet.blocks=1", RATE]


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of a language model, trained for an epoch on the manual."""
    pytest.importorskip("keras_hub")
    directory = tmp_path_factory.mktemp("language")
    shutil.copytree(REPOSITORY / "examples" / "language", directory, dirs_exist_ok=True)
    run_python(
        ["-m", "tfdist", "train", "language.gin", "--run_dir=runs/language", "train.epochs=1"], cwd=directory
    ).check()
    return directory


def check_curves(directory: Path, *training: str) -> None:
    """Two workers learn what one device learns."""
    curves = []
    for verb in (["train"], ["launch", "-n", "2", "train"]):
        run_dir = f"runs/{len(curves)}"
        run_python(["-m", "tfdist", *verb, *training, f"--run_dir={run_dir}"], cwd=directory).check()
        lines = map(json.loads, (directory / run_dir / "metrics.jsonl").read_text().splitlines())
        curves.append([line["loss"] for line in lines if line["split"] == "train"])
    one, two = curves
    assert one[-1] < one[0] and two == pytest.approx(one, abs=1e-5)


@pytest.mark.slow
def test_the_residual_network_learns_on_two_workers_what_it_learns_on_one_device(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow_datasets")
    shutil.copytree(REPOSITORY / "examples" / "cifar10", tmp_path, dirs_exist_ok=True)
    run_python(["make_small.py"], cwd=tmp_path).check()
    check_curves(tmp_path, "cifar10.gin", "train.epochs=2", *RESNET)


@pytest.mark.slow
def test_adapters_learn_on_two_workers_what_they_learn_on_one_device(language: Path) -> None:
    check_curves(language, "lora.gin", "train.epochs=3")


@pytest.mark.slow
def test_a_language_model_writes_on_from_a_text_before_and_after_its_export(language: Path) -> None:
    run_python(["-m", "tfdist", "export", "runs/language", "export.formats=['saved_model']"], cwd=language).check()

    def write(model: str, *flags: str) -> str:
        words = ["generate.py", f"runs/language/export/{model}", "The for statement", "--count=8", *flags]
        return run_python(words, cwd=language).check().stdout.strip().splitlines()[-1]

    greedy = write("model.keras")
    assert greedy.startswith("the for statement ")
    assert write("model.keras", "--temperature=1", "--top_k=1") == greedy
    settings = (("model.keras", 1), ("saved_model", 1), ("saved_model", 2))
    drawn = [write(model, "--temperature=2", f"--seed={seed}") for model, seed in settings]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_the_table_of_programs_side_by_side_is_what_they_count() -> None:
    counts = run_python([REPOSITORY / "examples/side_by_side/count.py"]).check().stdout
    assert counts in (REPOSITORY / "docs/from_fit.md").read_text()


@pytest.mark.slow
def test_diabetes_learns_and_two_replicas_learn_the_same(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_the_smallest_experiment_learns(tmp_path: Path) -> None:
    run_python(["-m", "tfdist.main", "--gin_file=smallest.gin", f"--run_dir={tmp_path}"], cwd=SMALLEST).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["train_metrics"]["accuracy"] > 0.9


def test_the_page_shows_the_files_as_they_are() -> None:
    page = (REPOSITORY / "docs/your_own_experiment.md").read_text()
    shown = {line.strip() for line in page.splitlines()}
    for name in ("smallest.py", "smallest.gin"):
        lines = [line.strip() for line in (SMALLEST / name).read_text().splitlines()]
        wanted = [line for line in lines if line and not line.startswith(("#", '"""'))]
        assert not set(wanted) - shown
    assert sum(line.startswith("train.") for line in wanted) <= 5
