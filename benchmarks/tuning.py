"""What a sweep costs beside the trainings in it, and beside KerasTuner's own and Optuna's.

The parts: how busy two workers are while one trial takes twice as long as the others; what is added to each trial,
beside KerasTuner's tuner in one process; how long and how well search.Optuna chooses values, beside Optuna alone. Takes
ten minutes.

    python benchmarks/tuning.py [--part=PART] [--quick] [--json=FILE]
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measuring import HERE, Figure, build_environment, choose_size, make_ratio, report

PARTS = {
    "busy": ({"rounds": 3, "num_trials": 17, "seconds": 2.0}, {"rounds": 1, "num_trials": 9, "seconds": 2.0}),
    "added": ({"rounds": 5, "num_trials": 8, "epochs": 3}, {"rounds": 2, "num_trials": 4, "epochs": 3}),
    "optuna": ({"rounds": 5, "num_trials": 100}, {"rounds": 2, "num_trials": 30}),
}
SMOKE = {
    "busy": {"rounds": 1, "num_trials": 3, "seconds": 0.1},
    "added": {"rounds": 1, "num_trials": 2, "epochs": 1},
    "optuna": {"rounds": 1, "num_trials": 3},
}
MOST_SECONDS = 300.0  # of one sweep
SPACE = (
    "tune.space = {'keras.optimizers.Adam.learning_rate': @space.log_uniform(low=1e-4, high=1e-1), "
    "'tuning_experiment.build.units': @space.integer(low=8, high=128, sampling='log'), "
    "'tuning_experiment.build.dropout': @space.uniform(low=0.0, high=0.6)}"
)


def measure(parts: Sequence[str], *, quick: bool) -> Iterator[list[Figure]]:
    return (MEASURES[part](**choose_size(PARTS[part][quick], SMOKE[part])) for part in parts)


def measure_busy(*, rounds: int, num_trials: int, seconds: float) -> list[Figure]:
    """How much of their time two workers have a trial while one of the trials takes twice as long as the others.

    The work can be divided evenly: `num_trials` is odd, and how long a trial takes in all is found by a sweep of six,
    without the first of each worker, in whose time the worker itself may start.
    """

    def sweep(count: int, *parameters: str) -> Sweep:
        numbers = f"tune.space = {{'tuning_experiment.Pause.number': @space.choice(values={list(range(count))})}}"
        pause = ("train.callbacks = [@tuning_experiment.Pause()]", f"tuning_experiment.Pause.seconds = {seconds}")
        search = ("tune.search = @search.Grid()", "tune.num_workers = 2", "train.epochs = 1", numbers)
        with run_sweep(*search, *pause, *parameters) as done:
            return done

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
    return [make_ratio(name, ours, available, 0.97, unit="s")]


def measure_added(*, rounds: int, num_trials: int, epochs: int) -> list[Figure]:
    """What a trial takes besides its training; one worker, the same model and epochs, random values.

    Training is what `fit` takes on the one side and the loop on the other, tracing included. What is added is all else
    between the end of one trial and the end of the next.
    """
    outside: list[list[float]] = [[], []]
    whole: list[list[float]] = [[], []]
    settings = ("tune.search = @search.Random()", f"tune.max_trials = {num_trials}", f"train.epochs = {epochs}", SPACE)
    for seed in range(rounds):
        with run_sweep(*settings, f"tune.seed = {seed}") as ours:
            results = [ours.directory / "sweep" / "trials" / f"{i:04d}" / "result.json" for i in range(num_trials)]
            training = [[json.loads(result.read_text())["wall_seconds"] for result in results]]
        with run_keras_sweep(epochs, seed, num_trials) as theirs:
            training.append([event["seconds"] for event in theirs.of("fit")])
        for who, sweep in enumerate((ours, theirs)):
            ends = [event["at"] for event in sweep.of("trial_ended")]
            lasted = [after - before for before, after in itertools.pairwise(ends)]
            besides = [a - b for a, b in zip(lasted, training[who][1:], strict=True)]
            outside[who].append(statistics.median(besides))
            whole[who].append(statistics.median(lasted))
    return [
        make_ratio("time added per trial ÷ KerasTuner's", *outside, 1.0, unit="s", at_most=True),
        make_ratio(f"time of a trial of {epochs} epochs ÷ KerasTuner's", *whole, None, unit="s"),
    ]


def measure_optuna(*, rounds: int, num_trials: int) -> list[Figure]:
    """What choosing the values of a trial takes by TPE, and the best that is found of a formula in place of trials."""
    import optuna

    from tfdist.tuning.search import oracles, search, space

    def error(rate: float, units: int) -> float:
        return 1 + abs(math.log10(rate) + 2) + abs(units - 48) / 64

    def suggest(trial: optuna.Trial) -> float:
        return error(trial.suggest_float("rate", 1e-4, 1.0, log=True), trial.suggest_int("units", 8, 128))

    ranges = space.Space({"rate": space.log_uniform(low=1e-4, high=1.0), "units": space.integer(low=8, high=128)})
    seconds: list[list[float]] = [[], []]
    best: list[list[float]] = [[], []]
    for seed in range(rounds):
        started = time.perf_counter()
        built = search.Optuna().build(ranges, "error", "min", max_trials=num_trials, epochs=1, seed=seed)
        client, errors = oracles.OracleClient(built, "error"), []
        while (trial := client.take()) is not None:
            errors.append(error(**ranges.decode(trial.hyperparameters.values)))
            client.end(trial.trial_id, errors[-1], 1, "", [], {})
        seconds[0].append((time.perf_counter() - started) / num_trials)
        best[0].append(min(errors))
        started = time.perf_counter()
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        study.optimize(suggest, n_trials=num_trials)
        seconds[1].append((time.perf_counter() - started) / num_trials)
        best[1].append(study.best_value)
    return [
        make_ratio("time to choose values ÷ Optuna's", *seconds, None, unit="s"),
        make_ratio("least error found ÷ Optuna's", *best, 1.0, at_most=True),
    ]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep that has ended.

    Attributes:
      directory: where its files are within `tfdist_sweep` or `keras_sweep`.
      events: what it wrote, each with `at`, in seconds since 1970.
    """

    directory: Path
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]


@contextlib.contextmanager
def run_sweep(*parameters: str) -> Iterator[Sweep]:
    """A sweep by the command, of tuning.gin with these parameters."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-", ignore_cleanup_errors=True) as scratch:
        given = [f"--gin_param={parameter}" for parameter in parameters]
        command = ["-m", "tfdist.main", f"--gin_file={HERE / 'tuning.gin'}", *given, "--mode=tune"]
        yield _run([*command, f"--run_dir={scratch}/sweep"], scratch, "sweep/sweep.jsonl")


@contextlib.contextmanager
def run_keras_sweep(max_epochs: int, seed: int, max_trials: int) -> Iterator[Sweep]:
    """A random search by tuning_peer.py."""
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-", ignore_cleanup_errors=True) as scratch:
        arguments = map(str, (f"{scratch}/log", scratch, max_epochs, seed, max_trials))
        yield _run([str(HERE / "tuning_peer.py"), *arguments], scratch, "log")


def _run(arguments: Sequence[str], directory: str, log: str) -> Sweep:
    """Runs a sweep; ends the benchmark where it does not end well."""
    local = {"TF_CPP_MIN_LOG_LEVEL": "3", "no_proxy": "127.0.0.1,localhost", "CUDA_VISIBLE_DEVICES": ""}
    with open(f"{directory}/output", "w") as output:
        ended = subprocess.run(
            [sys.executable, *arguments],
            env=build_environment(**local),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=MOST_SECONDS,
        )
    if ended.returncode:
        sys.exit(f"a sweep ended with status {ended.returncode}:\n{Path(directory, 'output').read_text()[-3000:]}")
    events = [json.loads(line) for line in Path(directory, log).read_text().splitlines()]
    return Sweep(Path(directory), [{**event, "at": _parse_moment(event["time"])} for event in events])


def _parse_moment(moment: float | str) -> float:
    return moment if isinstance(moment, float) else datetime.datetime.fromisoformat(moment).timestamp()


MEASURES = {"busy": measure_busy, "added": measure_added, "optuna": measure_optuna}


if __name__ == "__main__":
    report(__doc__, measure, parts=tuple(PARTS), has_quick=True)
