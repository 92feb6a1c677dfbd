"""Trains the digits with each recipe and five seeds, and writes the accuracies into docs/recipes.md.

    python tools/study.py [--run_dir=runs/study] [--seeds=5]

Each line of the table is a sweep of `--mode=tune` with a grid over train.seed. Takes some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tools"))

from marked_page import filled  # noqa: E402 (found only now)

PAGE = REPOSITORY / "docs" / "recipes.md"
BEGIN, END = "<!-- the study begins -->", "<!-- the study ends -->"
HEAD = """\
from __gin__ import dynamic_registration
import keras
from tfdist.data.sources import sklearn_sets
from tfdist.data.transforms import mixing
from tfdist.recipes import schedules
from tfdist.tasks import distillation
from tfdist.tuning.search import search
from tfdist.tuning.search import space

include 'configs/experiments/digits.gin'

keras.optimizers.Adam.learning_rate = 2e-3
tune.objective = 'val_accuracy'
tune.search = @search.Grid()
tune.num_workers = 2
"""
WARMUP = """
keras.optimizers.Adam.learning_rate = @schedules.Warmup()
schedules.Warmup.then = @schedules.CosineDecay()
schedules.Warmup.length = '0.1 of run'
schedules.CosineDecay.initial_learning_rate = 4e-3
schedules.CosineDecay.decay_steps = '0.9 of run'
schedules.CosineDecay.alpha = 0.0
"""
SWA = """
keras.optimizers.Adam.use_ema = True
train.swa_start = '0.75 of run'
"""
MIXUP = """
TRAIN_DATA = @train/mixing.MixUp
EVAL_DATA = @test/mixing.MixUp
train/mixing.MixUp.data = @train/sklearn_sets.load_digits
test/mixing.MixUp.data = @test/sklearn_sets.load_digits
mixing.MixUp.num_classes = 10
supervised.Supervised.loss = @keras.losses.CategoricalCrossentropy()
supervised.Supervised.metrics = ['accuracy']
keras.losses.CategoricalCrossentropy.from_logits = True
"""
DISTILLATION = """
TASK = @distillation.Distillation()
distillation.Distillation.teacher = 'TEACHER'
distillation.Distillation.temperature = 3.0
distillation.Distillation.loss = @keras.losses.SparseCategoricalCrossentropy()
distillation.Distillation.metrics = ['accuracy']
"""
RECIPES = {
    "plain": "",
    "warm-up and cosine": WARMUP,
    "EMA": "keras.optimizers.Adam.use_ema = True\nkeras.optimizers.Adam.ema_momentum = 0.98\n",
    "SWA": SWA,
    "mixup": MIXUP,
    "distillation": DISTILLATION,
}
SETS = {
    "all 1,437": ("train.epochs = 12\n", 12),
    "the first 150": ("train/sklearn_sets.load_digits.num_examples = 150\ntrain.global_batch_size = 32\n", 60),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run_dir", default=pathlib.Path("runs/study"), type=pathlib.Path)
    parser.add_argument("--seeds", default=5, type=int)
    given = parser.parse_args()
    rows = [f"| recipe | {' | '.join(SETS)} |", "|---" * (1 + len(SETS)) + "|"]
    cells: dict[str, list[str]] = {recipe: [] for recipe in RECIPES}
    for set_name, (settings, epochs) in SETS.items():
        folder = given.run_dir / set_name.replace(" ", "_").replace(",", "")
        common = f"{HEAD}{settings}train.epochs = {epochs}\n"
        teacher = folder / "teacher"
        train(teacher, common + WARMUP + "convnet.build_convnet.dropout = 0.5\n", "train", seeds=0)
        for recipe, text in RECIPES.items():
            run_dir = folder / recipe.replace(" ", "_")
            train(run_dir, common + text.replace("TEACHER", str(teacher.resolve())), "tune", seeds=given.seeds)
            found = [100 * accuracy for accuracy in accuracies(run_dir)]
            cells[recipe].append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}")
            print(f"{set_name}, {recipe}: {cells[recipe][-1]}", flush=True)
    rows += [f"| {recipe} | {' | '.join(found)} |" for recipe, found in cells.items()]
    PAGE.write_text(filled(PAGE, BEGIN, END, "\n".join(rows) + "\n"))


def train(run_dir: pathlib.Path, text: str, mode: str, *, seeds: int) -> None:
    """Runs the command, unless its result is there."""
    if (run_dir / "result.json").exists():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    gin_file = run_dir.with_suffix(".gin")
    if seeds:
        text += (
            f"tune.space = {{'train.seed': @space.choice(values={list(range(seeds))})}}\ntune.max_trials = {seeds}\n"
        )
    gin_file.write_text(text)
    command = [sys.executable, "-m", "tfdist.main", f"--gin_file={gin_file}", f"--mode={mode}", f"--run_dir={run_dir}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")


def accuracies(run_dir: pathlib.Path) -> list[float]:
    """The last accuracy of each trial on the test examples."""
    results = sorted(run_dir.glob("trials/*/result.json"))
    return [json.loads(path.read_text())["eval_metrics"]["accuracy"] for path in results]


if __name__ == "__main__":
    main()
