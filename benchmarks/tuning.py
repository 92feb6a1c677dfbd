"""What a sweep costs beside the trainings in it, and beside KerasTuner's own.

The parts: how busy two workers are while one trial takes twice as long as the others; how often an oracle is asked, and
how long the command lasts after its last trial, beside KerasTuner's chief with two workers over gRPC; what is added to
each trial, beside KerasTuner's tuner in one process. Takes twenty minutes.

    python benchmarks/tuning.py [--part=PART] [--quick] [--json=FILE]
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence

from measuring import Figure, as_table, choose_size, ratio, report
from tuning_sweeps import Sweep, keras_sweep, tfdist_sweep

PARTS = {
    "busy": ({"rounds": 3, "num_trials": 17, "seconds": 2.0}, {"rounds": 1, "num_trials": 9, "seconds": 2.0}),
    "ending": ({"rounds": 3}, {"rounds": 1}),
    "added": ({"rounds": 5, "num_trials": 8, "epochs": 3}, {"rounds": 2, "num_trials": 4, "epochs": 3}),
}
SMOKE = {
    "busy": {"rounds": 1, "num_trials": 3, "seconds": 0.1},
    "ending": {"rounds": 1},
    "added": {"rounds": 1, "num_trials": 2, "epochs": 1},
}
SPACE = (
    "tune.space = {'keras.optimizers.Adam.learning_rate': @space.log_uniform(low=1e-4, high=1e-1), "
    "'tuning_experiment.build.units': @space.integer(low=8, high=128, sampling='log'), "
    "'tuning_experiment.build.dropout': @space.uniform(low=0.0, high=0.6)}"
)
MAX_EPOCHS = choose_size(9, 3)  # of Hyperband, with factor 3
HYPERBAND = "tune.search = @search.Hyperband(factor=3)"


def measure(parts: Sequence[str], *, quick: bool) -> list[Figure]:
    found = []
    for part in parts:
        figures = MEASURES[part](**choose_size(PARTS[part][quick], SMOKE[part]))
        print(as_table(figures), flush=True)  # the whole takes long, and may be cut off
        found += figures
    return found


def busy(*, rounds: int, num_trials: int, seconds: float) -> list[Figure]:
    """How much of their time two workers have a trial while one of the trials takes twice as long as the others.

    The work can be divided evenly: `num_trials` is odd, and how long a trial takes in all is found by a sweep of six,
    without the first of each worker, in whose time the worker itself may start.
    """

    def sweep(count: int, *parameters: str) -> Sweep:
        numbers = f"tune.space = {{'tuning_experiment.Pause.number': @space.choice(values={list(range(count))})}}"
        pause = ("train.callbacks = [@tuning_experiment.Pause()]", f"tuning_experiment.Pause.seconds = {seconds}")
        search = ("tune.search = @search.Grid()", "tune.num_workers = 2", "train.epochs = 1", numbers)
        with tfdist_sweep(*search, *pause, *parameters) as running:
            running.wait()
        return running

    usual = statistics.median(event["seconds"] for event in sweep(choose_size(6, 3)).of("trial_ended")[2:])
    straggler = (
        f"tuning_experiment.Pause.straggler = {num_trials // 2}",
        f"tuning_experiment.Pause.straggler_seconds = {seconds + usual}",
    )
    ours, available = [], []
    for _ in range(rounds):
        done = sweep(num_trials, *straggler)
        ours.append(sum(event["seconds"] for event in done.of("trial_ended")))
        available.append(2 * (done.of("sweep_ended")[-1]["at"] - done.of("trial_started")[0]["at"]))
    name = f"busy ÷ (2 workers × wall), {num_trials} trials, one of them 2×"
    return [ratio(name, ours, available, 0.97, unit="s")]


def ending(*, rounds: int) -> list[Figure]:
    """How often the oracle of a Hyperband sweep with two workers is asked, and what comes after the last trial.

    KerasTuner's trials sleep for about as long as ours take.
    """
    calls: list[list[float]] = [[], []]
    trials: list[list[float]] = [[], []]
    tails: list[list[float]] = [[], [], []]
    for seed in range(rounds):
        settings = (f"train.epochs = {MAX_EPOCHS}", f"tune.seed = {seed}", "tune.num_workers = 2")
        with tfdist_sweep(HYPERBAND, SPACE, *settings) as ours:
            ours.wait()
            written = (ours.directory / "sweep" / "result.json").stat().st_mtime
        with keras_sweep("hyperband", MAX_EPOCHS, seed, seconds=0.4, num_workers=2) as theirs:
            theirs.wait()
        asked = theirs.of("asked")
        calls[0].append(ours.of("trial_ended")[-1]["asked"])
        calls[1].append(len(asked))
        trials[0].append(len(ours.of("trial_started")))
        trials[1].append(sum(event["status"] == "RUNNING" for event in asked))
        tails[0].append(written - ours.of("trial_ended")[-1]["at"])
        tails[1].append(ours.ended - ours.of("trial_ended")[-1]["at"])
        tails[2].append(theirs.ended - theirs.of("trial_ended")[-1]["at"])
    one = [1.0] * rounds
    return [
        ratio("Hyperband: oracle calls ÷ trials", calls[0], trials[0], 1.1, unit="calls", at_most=True),
        ratio("… of KerasTuner's chief", calls[1], trials[1], None, unit="calls"),
        ratio("from the last trial's end to result.json", tails[0], one, 1.0, unit="s", at_most=True),
        ratio("… to the command's end, the report drawn", tails[1], one, None, unit="s"),
        ratio("… to the end of KerasTuner's chief", tails[2], one, None, unit="s"),
    ]


def added(*, rounds: int, num_trials: int, epochs: int) -> list[Figure]:
    """What a trial takes besides its training; one worker, the same model and epochs, random values.

    Training is what `fit` takes on the one side and the loop on the other, tracing included. What is added is all else
    between the end of one trial and the end of the next.
    """
    outside: list[list[float]] = [[], []]
    whole: list[list[float]] = [[], []]
    settings = ("tune.search = @search.Random()", f"tune.max_trials = {num_trials}", f"train.epochs = {epochs}", SPACE)
    for seed in range(rounds):
        with tfdist_sweep(*settings, f"tune.seed = {seed}") as ours:
            ours.wait()
            results = [ours.directory / "sweep" / "trials" / f"{i:04d}" / "result.json" for i in range(num_trials)]
            training = [[json.loads(result.read_text())["wall_seconds"] for result in results]]
        with keras_sweep("random", epochs, seed, max_trials=num_trials) as theirs:
            theirs.wait()
        training.append([event["seconds"] for event in theirs.of("fit")])
        for who, sweep in enumerate((ours, theirs)):
            ends = [event["at"] for event in sweep.of("trial_ended")]
            lasted = [after - before for before, after in itertools.pairwise(ends)]
            besides = [a - b for a, b in zip(lasted, training[who][1:], strict=True)]
            outside[who].append(statistics.median(besides))
            whole[who].append(statistics.median(lasted))
    return [
        ratio("time added per trial ÷ KerasTuner's", *outside, 1.0, unit="s", at_most=True),
        ratio(f"time of a trial of {epochs} epochs ÷ KerasTuner's", *whole, None, unit="s"),
    ]


MEASURES = {"busy": busy, "ending": ending, "added": added}


if __name__ == "__main__":
    report(__doc__, measure, parts=tuple(PARTS), has_quick=True)
