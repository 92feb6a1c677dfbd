"""How good a searched starting point is beside scikit-learn's HistGradientBoosting, on tables of scikit-learn.

A fifth of each table is kept from both. `tfdist.new --search_minutes=N` gets the rest, and chooses by a fifth. The
peer trains on the rest twice: with its defaults, and as the best of 20 random settings by five-fold cross-validation.
Scores are accuracy and, for diabetes, R². There is one split, and 36 to 114 rows are kept: differences of a few
hundredths are noise. Takes three times N minutes, and two more.

    python benchmarks/new.py [--minutes=N] [--json=FILE]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import Figure, choose_size, ratio, report
from sklearn import datasets, ensemble, model_selection

WINE = {"wine": datasets.load_wine}
TABLES = {"breast cancer": datasets.load_breast_cancer, **WINE, "diabetes": datasets.load_diabetes}
SPACE = {
    "learning_rate": [0.01, 0.03, 0.1, 0.3],
    "max_iter": [50, 100, 200, 400],
    "max_leaf_nodes": [7, 15, 31, 63],
    "min_samples_leaf": [5, 10, 20, 40],
    "l2_regularization": [0.0, 0.1, 1.0, 10.0],
}


def measure(*, minutes: int) -> list[Figure]:
    figures = []
    for name, load in choose_size(TABLES, WINE).items():
        table = load(as_frame=True)
        table.frame.columns = [re.sub(r"\W", "_", column) for column in table.frame.columns]
        is_number = name == "diabetes"
        training, kept = model_selection.train_test_split(
            table.frame, test_size=0.2, random_state=0, stratify=None if is_number else table.frame["target"]
        )
        ours = searched(training, kept, minutes, is_number)
        for how, peer in peers(training, kept, is_number).items():
            figures.append(ratio(f"{name}: {minutes} minutes ÷ {how}", [ours], [peer], None, unit="score"))
    return figures


def searched(training: Any, kept: Any, minutes: int, is_number: bool) -> float:
    """The score on the kept rows of what the search found."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as scratch:
        training.to_csv(Path(scratch) / "table.csv", index=False)
        own, best = f"{scratch}/own", f"{scratch}/own/runs/best"
        given = [f"--file={scratch}/table.csv", "--target=target", f"--search_minutes={minutes}"]
        given += choose_size([], ["--search_trials=1"])
        subprocess.run([sys.executable, "-m", "tfdist.new", own, *given], check=True)
        kept.to_parquet(f"{own}/data/kept.parquet")
        evaluate = ["--mode=evaluate", f"--run_dir={best}", "--gin_param=test/experiment.load_rows.split = 'kept'"]
        subprocess.run([sys.executable, "-m", "tfdist.main", *evaluate], check=True)
        metrics = json.loads(Path(best, "evaluation.json").read_text())
    return 1 - metrics["loss"] / kept["target"].var(ddof=0) if is_number else metrics["accuracy"]


def peers(training: Any, kept: Any, is_number: bool) -> dict[str, float]:
    kind = ensemble.HistGradientBoostingRegressor if is_number else ensemble.HistGradientBoostingClassifier
    searches = {"n_iter": choose_size(20, 1), "cv": choose_size(5, 2)}
    chosen = model_selection.RandomizedSearchCV(kind(random_state=0), SPACE, **searches, random_state=0)
    x, y = training.drop(columns="target"), training["target"]
    models = {"HistGradientBoosting": kind(random_state=0), "HistGradientBoosting, searched": chosen}
    return {how: model.fit(x, y).score(kept.drop(columns="target"), kept["target"]) for how, model in models.items()}


if __name__ == "__main__":
    report(__doc__, measure, numbers={"minutes": 3})
