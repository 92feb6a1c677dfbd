"""`tfdist prove` and `--mode=prove`: shows that an experiment trains on an engine as on one device, and what it costs.

It trains some steps from the same start on one device, twice on the engine, and once more on the engine from a
checkpoint in the middle, as after a kill. Each training is a process of its own, or several, of the experiment as it
is. Then it compares losses, metrics, weights, seeds and optimizer states step by step. Two further trainings of one
step show the gradients, and further ones, undisturbed, the speed.

Invariant: nothing but its own directory is written, which goes unless --run_dir names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from tfdist.checkpoint import catalog
from tfdist.checkpoint.restore import load
from tfdist.command_line import flags
from tfdist.config import loading
from tfdist.errors import EXIT_DONE, EXIT_NOT_PROVEN, UserError
from tfdist.storage import files
from tfdist.telemetry.console.console_text import align_columns
from tfdist.telemetry.records import Unreadable, as_point, read_lines
from tfdist.telemetry.result import RunResult, read_result
from tfdist.telemetry.run_directory import RunDirectory

TOLERANCE = 1e-5  # of numbers up to 1; of larger ones, relative
TOLERANCE_16_BITS = 2e-3
SMALL = 0.1  # of the tolerance: what rounding alone may have done
METRICS, WEIGHTS, OPTIMIZER, SEEDS = "loss and metrics", "weights", "optimizer", "seeds"
KINDS = METRICS, WEIGHTS, OPTIMIZER, SEEDS
ROOMS = {"model": WEIGHTS, "seeds": SEEDS, "optimizer": OPTIMIZER}  # kinds by the beginnings of tensors' names
SGD, MOMENTUM = "prove/keras.optimizers.SGD", "/momentum"
# One step of SGD with the rate 1 leaves the negative gradient, bit for bit, in the momentum, which begins with 0.
FIRST_GRADIENTS = (
    "train.steps=1",
    "train.callbacks=[]",
    "train.swa_start=None",
    f"train.optimizer=@{SGD}",
    f"{SGD}.learning_rate=1.0",
    f"{SGD}.momentum=0.5",
    *(f"{SGD}.{name}=None" for name in ("clipnorm", "clipvalue", "global_clipnorm")),
)
NEVER = 10**9  # steps
UNDISTURBED = (
    "train.epochs=None",
    "train.steps_per_call=None",
    "train.callbacks=[]",
    f"train.eval_every='{NEVER} steps'",
    f"train.checkpoint=@tfdist.CheckpointPolicy(every_steps={NEVER})",
    "train.sinks=[]",
)
TIMED_SECONDS, MOST_TIMED = 3.0, 2000  # steps
MOST_SHOWN = 5
LATER = "The first steps agree: a layer, a callback or an optimizer keeps a state that depends on the replica."


class Engine(NamedTuple):
    """A value of train.strategy, None: the experiment's own; and Python's arguments before those of tfdist.main."""

    strategy: str | None
    program: Sequence[str] = ("-m", "tfdist.main")


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """What a training that has ended has left.

    Attributes:
      points: losses and metrics by step and name.
      checkpoints: their paths by step.
      result: of the run.
    """

    points: Mapping[int, Mapping[str, np.ndarray]]
    checkpoints: Mapping[int, str]
    result: RunResult

    def load_step(self, step: int) -> dict[str, dict[str, np.ndarray]]:
        """Loads the numbers at a step by kind and name."""
        kinds: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in KINDS}
        kinds[METRICS] = dict(self.points.get(step, {}))
        for name, array in load(self.checkpoints[step]).tensors.items():
            room, _, rest = name.partition("/")
            if room in ROOMS:
                kinds[ROOMS[room]][rest] = np.asarray(array)
        return kinds


@dataclasses.dataclass(frozen=True)
class TrainingDifference:
    """The distance of two trainings.

    Attributes:
      largest: for each kind, over all steps; infinity where one has numbers that the other has not.
      first_step: where they are further apart than the tolerance; None: nowhere.
      names: of what is apart there, by kind, the furthest first.
      inexact: the kinds of which not every number is the same, bit for bit.
    """

    largest: Mapping[str, float]
    first_step: int | None
    names: Mapping[str, Sequence[str]]
    inexact: Set[str]


@dataclasses.dataclass(frozen=True)
class ProcessTrainer:
    """Starts trainings of an experiment, each in a directory below `root`."""

    given: flags.FlagValues
    root: pathlib.Path

    def train(self, name: str, engine: Engine, settings: Sequence[str]) -> TrainingRecord:
        """Trains in the directory `name`; raises UserError with what a training that failed has said."""
        own = [] if engine.strategy is None else [f"train.strategy={engine.strategy}"]
        command = [sys.executable, *engine.program, *(f"--gin_file={path}" for path in self.given.gin_file)]
        settings = ["train.recovery='off'", *settings, *own]
        command += [f"--gin_param={text}" for text in (*self.given.gin_param, *settings)]
        command.append(f"--run_dir={self.root / name}")
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if self.given.devices else {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != EXIT_DONE:
            raise UserError((done.stderr.strip() or done.stdout.strip()).rpartition("error: ")[2])
        return _read(self.root / name)

    def resume(self, name: str, copy: str, step: int, engine: Engine, settings: Sequence[str]) -> TrainingRecord:
        """Has an engine continue a copy of the run `name`, as a kill after `step` would have left it."""
        shutil.copytree(self.root / name, self.root / copy)
        directory = RunDirectory(str(self.root / copy))
        os.remove(directory.result)
        for each, path in catalog.list_paths(directory.checkpoints):
            if each > step:
                shutil.rmtree(path)
        return self.train(copy, engine, settings)


def prove(given: flags.FlagValues) -> int:
    """Trains, compares and prints; returns the exit status."""
    statements = loading.read_statements(gin_files=given.gin_file, gin_params=given.gin_param)
    engines = _list_engines(given, statements)
    with tempfile.TemporaryDirectory(prefix="tfdist-prove-") as scratch:
        if files.is_remote(given.run_dir or ""):
            raise UserError(f"--run_dir={given.run_dir} is not local. Write a new local directory.")
        root = pathlib.Path(given.run_dir or scratch)
        if given.run_dir and root.exists() and any(root.iterdir()):
            raise UserError(f"--run_dir={given.run_dir} is not empty. Write a new directory.")
        report = _build_report(ProcessTrainer(given, root), engines, statements)
    experiment = f"{', '.join(given.gin_file)} on {report['strategy']}"
    print(json.dumps(report) if given.log == "json" else _format_report(report, experiment), flush=True)
    return EXIT_DONE if report["proven"] else EXIT_NOT_PROVEN


def _list_engines(given: flags.FlagValues, statements: Mapping[str, str]) -> list[Engine]:
    """Lists one device and engines of 2, 4 … replicas, of which the last is to be proven; raises UserError."""
    counts = [f"--devices={each}" for each in given.devices] + [f"--workers={given.workers}"] * bool(given.workers)
    if len(counts) > 1 or not (counts or "train.strategy" in statements):
        raise UserError(
            f"Received {' and '.join(counts) or 'no engine'}. Write one of --devices=2, --workers=2 and "
            "train.strategy=@tfdist.Mirrored()."
        )
    one_device = Engine("@tfdist.OneDevice()")
    if not counts:
        return [one_device, Engine(None)]
    count = counts[0].partition("=")[2]
    if not count.isdecimal() or int(count) < 2:
        raise UserError(f"Received {counts[0]}. Write a number of replicas, such as --devices=2.")
    powers = [2**i for i in range(1, 12) if 2**i < int(count)]
    return [one_device, *(_build_engine(given, number) for number in (*powers, int(count)))]


def _build_engine(given: flags.FlagValues, number: int) -> Engine:
    if given.devices:
        return Engine(f"@tfdist.Mirrored(num_cpu_devices={number})")
    strategy = "@tfdist.Horovod()" if given.launcher == "horovod" else "@tfdist.MultiWorker()"
    launch = [f"--workers={number}", f"--launcher={given.launcher}", "--max_restarts=0", "--"]
    return Engine(strategy, ["-m", "tfdist.launch", *launch])


def _build_report(trainer: ProcessTrainer, engines: Sequence[Engine], statements: Mapping[str, str]) -> dict[str, Any]:
    """Trains and compares; returns the report."""
    steps, one_device, engine = trainer.given.steps, engines[0], engines[-1]
    compared = [
        f"train.steps={steps}",
        "train.log_every_steps=1",
        "train.xla='off'",
        "train.sinks=[]",
        f"train.checkpoint=@tfdist.CheckpointPolicy(every_steps=1, keep_last={steps + 1})",
        *([] if "train.deterministic" in statements else ["train.deterministic=True"]),
    ]
    alone = trainer.train("one_device", one_device, compared)
    precisions = [statements.get(f"train.{name}", "") for name in ("precision", "reduce_precision")]
    tolerance = TOLERANCE_16_BITS if any("16" in each for each in precisions) else TOLERANCE
    strategy = engine.strategy or statements["train.strategy"]
    report = {"steps": steps, "strategy": strategy, "tolerance": tolerance, "proven": False}
    try:
        there = trainer.train("engine", engine, compared)
    except UserError as error:
        return report | {"refused": str(error)}
    again = trainer.train("again", engine, compared)
    resumed = trainer.resume("engine", "resumed", steps // 2, engine, compared)
    difference = _compare(alone, there, tolerance)
    repeats = not _compare(there, again, tolerance).inexact
    rest = _compare(there, resumed, tolerance)
    # A replica resumes with the sum of all replicas' metrics, so these may round otherwise.
    resumes = rest.first_step is None and rest.inexact <= {METRICS}
    settings = [*compared, *FIRST_GRADIENTS]
    first = trainer.train("gradients_one_device", one_device, settings), trainer.train("gradients", engine, settings)
    slots, model = _measure_step(*first, 1)[OPTIMIZER].items(), trainer.root / "one_device"
    gradients = _group_by_layer({name: distance for name, distance in slots if name.endswith(MOMENTUM)}, model)
    same_gradients = max(gradients.values(), default=0.0) <= tolerance
    reasons, first_step = _explain(difference, alone, there, repeats, same_gradients), difference.first_step
    rounded = None
    if reasons == [LATER] and first_step is not None:
        follow = functools.partial(trainer.resume, "engine", "resumed_alone", engine=one_device, settings=compared)
        rounded = _find_rounding(follow, alone, there, first_step, tolerance)
    if rounded is not None:
        reasons = [
            f"Rounding parts them: from the engine's state after step {rounded}, which differs by rounding, one device "
            "parts as soon. A tiny number's sign decides there, as in a ReLU, or rounding grows."
        ]
    if repeats and not resumes:
        reasons.append("A resumed training has other numbers: a state or a random generator is in no checkpoint.")
    apart = _group_by_layer(dict.fromkeys(difference.names.get(WEIGHTS, ()), 0.0), model)
    return report | {
        "proven": (first_step is None or rounded is not None) and same_gradients and repeats and resumes,
        "difference": difference.largest,
        "gradients": gradients,
        "first_step": first_step,
        "first_layer": next(iter(apart), None),
        "apart": difference.names,
        "repeats": repeats,
        "resumes": resumes,
        "reasons": reasons,
        "cost": _measure_cost(trainer, engines, alone.result) if trainer.given.cost else [],
    }


def _read(path: pathlib.Path) -> TrainingRecord:
    """Reads what a run has left, but for its tensors."""
    directory = RunDirectory(str(path))
    points: dict[int, dict[str, np.ndarray]] = {}
    for point in map(as_point, read_lines(directory.metrics, Unreadable())):
        if point is not None:
            numbers = {**point.metrics, "learning_rate": point.learning_rate}
            named = {f"{point.split} {name}": np.asarray(value, np.float64) for name, value in numbers.items()}
            points.setdefault(point.step, {}).update(named)
    result = read_result(directory)
    assert result is not None  # of a run that ended well
    return TrainingRecord(points, dict(catalog.list_paths(directory.checkpoints)), result)


def _group_by_layer(distances: Mapping[str, float], run: pathlib.Path) -> dict[str, float]:
    """The largest distance in each layer of the model, in the model's order as far as Keras could save that."""
    layers: list[str] = []
    with contextlib.suppress(FileNotFoundError), zipfile.ZipFile(RunDirectory(str(run)).model) as archive:
        model = json.loads(archive.read("config.json"))
        if model["class_name"] in ("Functional", "Sequential"):
            layers = [layer.get("name") or layer["config"].get("name") for layer in model["config"]["layers"]]
    largest: dict[str, float] = {}
    for name, distance in distances.items():
        layer = name.partition("/")[0]
        largest[layer] = max(largest.get(layer, 0.0), distance)
    return dict(sorted(largest.items(), key=lambda item: [*layers, item[0]].index(item[0])))


def _compare(one: TrainingRecord, other: TrainingRecord, tolerance: float) -> TrainingDifference:
    largest = dict.fromkeys(KINDS, 0.0)
    first_step, names = None, {}
    steps = {*one.checkpoints}
    for step in sorted(steps & {*other.checkpoints}):
        apart: dict[str, list[str]] = {}
        for kind, distances in _measure_step(one, other, step).items():
            largest[kind] = max([largest[kind], *distances.values()])
            if beyond := [name for name, distance in distances.items() if distance > tolerance]:
                apart[kind] = sorted(beyond, key=lambda name: -distances[name])
        if apart and first_step is None:
            first_step, names = step, apart
    inexact = {kind for kind, distance in largest.items() if distance}
    return TrainingDifference(largest, first_step, names, inexact if steps == {*other.checkpoints} else {*KINDS})


def _measure_step(one: TrainingRecord, other: TrainingRecord, step: int) -> dict[str, dict[str, float]]:
    """The distances of two trainings at a step, by kind and name."""
    ours, theirs = one.load_step(step), other.load_step(step)
    return {
        kind: {name: _measure(ours[kind].get(name), theirs[kind].get(name)) for name in ours[kind] | theirs[kind]}
        for kind in KINDS
    }


def _measure(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """The largest difference of two arrays, relative to what is above 1; infinity where one is missing."""
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    if one.tobytes() == other.tobytes():
        return 0.0
    if one.dtype.kind not in "fiub":
        one, other = one.astype(np.float32), other.astype(np.float32)
    a, b = one.astype(np.float64), other.astype(np.float64)
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    return float(np.nan_to_num(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(a)))), nan=np.inf))


def _explain(
    difference: TrainingDifference, alone: TrainingRecord, engine: TrainingRecord, repeats: bool, same_gradients: bool
) -> list[str]:
    """The likely reasons why two trainings part."""
    noted = [note for note in engine.result.notes if note not in alone.result.notes]
    apart = difference.names
    if noted or (not apart and repeats and same_gradients):
        return noted
    if not repeats:
        return [
            "Each training on the engine has other numbers: something draws without a seed, reads the clock, or "
            "depends on the order of threads."
        ]
    if SEEDS in apart:
        return ["A layer draws more often, or less, on a replica: it draws where only some rows are, or by Python."]
    if apart.keys() == {METRICS} and all(name.startswith("eval ") for name in apart[METRICS]):
        return ["Only the evaluation differs: it has other rows there, or a metric is not a sum over rows."]
    if apart and difference.first_step != min(engine.checkpoints):
        return [LATER]
    if METRICS in apart:
        return [
            "The first loss differs already. The model or the loss computes over the rows that it gets, such as their "
            "mean or number. On a replica these are some of the batch. Or the data has other rows."
        ]
    if same_gradients:
        return ["The first gradients are the same, and the update is not: an optimizer depends on the replica."]
    return [
        "The first loss is the same and the gradients are not: a gradient or a regularizer of your own depends on the "
        "rows of a replica."
    ]


def _find_rounding(
    follow: Callable[[int], TrainingRecord], alone: TrainingRecord, there: TrainingRecord, first: int, tolerance: float
) -> int | None:
    """Returns a step after which two trainings differ by rounding and one device by itself makes more of that.

    There one device goes on from the engine's state. If it is apart from the training on one device alone about as
    soon as the engine is, at step `first`, then it computes what the engine does. A state that a replica keeps for
    itself would not part it. None: there is no such step.
    """
    beyond = _compare(alone, there, SMALL * tolerance).first_step
    start = (beyond or first) - 1
    parted = _compare(alone, follow(start), tolerance).first_step if start else None
    return start if parted is not None and parted - first <= first - start else None


def _measure_cost(trainer: ProcessTrainer, engines: Sequence[Engine], seen: RunResult) -> list[dict[str, float | None]]:
    """Trains undisturbed on each engine; returns its speed behind the first step, beside that of the first engine."""
    steps = max(20, min(MOST_TIMED, int(TIMED_SECONDS * seen.steps / max(1e-3, seen.seconds["compute"]))))
    cost: list[dict[str, float | None]] = []
    one_device = 0.0
    for number, engine in enumerate(engines):
        result = trainer.train(f"timed_{number}", engine, [*UNDISTURBED, f"train.steps={steps}"]).result
        seconds, waited = result.seconds["compute"] + result.seconds["input_wait"], result.seconds["peer_wait"]
        rate, replicas = (result.steps - 1) / (seconds + waited), result.num_replicas or 1
        one_device = one_device or rate
        # Accelerators have their part of a step each; replicas on the processors of one machine share these.
        share = 1 / replicas if result.hardware["accelerators"] else 1.0
        cost.append(
            {
                "replicas": replicas,
                "steps_per_second": rate,
                "without_communication": (result.steps - 1) / seconds if (result.num_workers or 1) > 1 else None,
                "efficiency": rate * share / one_device,
            }
        )
    return cost


def _format_report(report: Mapping[str, Any], experiment: str) -> str:
    if "refused" in report:
        return f"not proven: {experiment} does not train there:\n{report['refused']}"
    rows = [["", "largest difference"], *([kind, f"{each:.1e}"] for kind, each in report["difference"].items())]
    rows += [[f"gradients of step 1: {layer}", f"{each:.1e}"] for layer, each in report["gradients"].items()]
    rows += [["two trainings there", "same bits" if report["repeats"] else "differ"]]
    rows += [["stopped in the middle and resumed", "same bits" if report["resumes"] else "differ"]]
    lines = [f"{report['steps']} steps of {experiment}, beside one device:", align_columns(rows, ())]
    if report["cost"]:
        columns = ["replicas", "steps/s", "without communication", "efficiency"]
        shown = [["" if each is None else f"{each:.3g}" for each in row.values()] for row in report["cost"]]
        lines.append(align_columns([columns, *shown], columns))
    if report["first_step"] is not None:
        apart = [f"{kind}: {', '.join(names[:MOST_SHOWN])}" for kind, names in report["apart"].items()]
        layer = f" and layer {report['first_layer']}" if report["first_layer"] else ""
        lines.append(f"They part at step {report['first_step']:,}{layer}: {'; '.join(apart)}.")
    lines += report["reasons"]
    return "\n".join([*lines, f"{'proven' if report['proven'] else 'not proven'} to {report['tolerance']:g}"])
