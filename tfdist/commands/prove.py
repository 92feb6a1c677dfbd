"""`tfdist prove EXPERIMENT.gin`: shows that an experiment trains on an engine as on one device.

It trains some steps from the same start on one device, twice on the engine, and once more on the engine from a
checkpoint in the middle, as after a kill. Each training is a process of its own, or several, of the experiment as it
is. Then it compares losses, metrics, weights, seeds and optimizer states step by step. Exit status: 0 where all agree,
8 where something does not.

Invariant: nothing but its own directory is written, which goes unless --keep names it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist import command_line
from tfdist.checkpoint import catalog
from tfdist.checkpoint.restore import load
from tfdist.command_line import exit_status_of, flags
from tfdist.errors import EXIT_DONE, EXIT_NOT_PROVEN, UserError
from tfdist.telemetry.console.console_text import align_columns
from tfdist.telemetry.records import Unreadable, as_point, read_lines
from tfdist.telemetry.result import read_result
from tfdist.telemetry.run_directory import RunDirectory

ABOUT = """\
tfdist prove EXPERIMENT.gin [NAME=VALUE …] [FLAGS]

Trains some steps on one device and on an engine, from the same start, and compares them.

  tfdist prove my.gin --devices=2                      # replicas on parts of this machine's CPU
  tfdist prove my.gin --workers=2                      # two processes of MultiWorkerMirroredStrategy
  tfdist prove my.gin --workers=2 --launcher=horovod
  tfdist prove my.gin --strategy='@tfdist.Mirrored()'  # the GPUs of this machine

Exit statuses: 0 all agree, 2 yours to mend, 8 something differs.
"""
FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("gin_file", None, "the experiment's", flag_values=FLAGS)
flags.DEFINE_multi_string("gin_param", None, "the experiment's", flag_values=FLAGS)
flags.DEFINE_integer("steps", 10, "to train", lower_bound=2, flag_values=FLAGS)
flags.DEFINE_integer("devices", None, "parts of the CPU, each a replica", lower_bound=2, flag_values=FLAGS)
flags.DEFINE_integer("workers", None, "processes, each a worker", lower_bound=2, flag_values=FLAGS)
flags.DEFINE_enum("launcher", "tf_config", ["tf_config", "horovod"], "of the workers", flag_values=FLAGS)
flags.DEFINE_string("strategy", None, "a value of train.strategy", flag_values=FLAGS)
flags.DEFINE_string("keep", None, "a directory for the runs, which stays", flag_values=FLAGS)
flags.DEFINE_bool("json", False, "print one JSON object instead of text", flag_values=FLAGS)
TOLERANCE = 1e-5  # of numbers up to 1; of larger ones, relative
TOLERANCE_16_BITS = 2e-3
KINDS = ("loss and metrics", "weights", "optimizer", "seeds")
ROOMS = {"model": "weights", "seeds": "seeds", "optimizer": "optimizer"}  # kinds by the beginnings of tensors' names
MOST_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class TrainingRecord:
    """What a training that has ended has left.

    Attributes:
      points: losses and metrics by step and name.
      checkpoints: their paths by step.
      notes: that the run made of itself.
    """

    points: Mapping[int, Mapping[str, np.ndarray]]
    checkpoints: Mapping[int, str]
    notes: Sequence[str]

    def load_step(self, step: int) -> dict[str, dict[str, np.ndarray]]:
        """Loads the numbers at a step by kind and name."""
        kinds: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in KINDS}
        kinds["loss and metrics"] = dict(self.points.get(step, {}))
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
      names: of what is apart there, by kind.
      has_same_bits: whether every number is the same.
    """

    largest: Mapping[str, float]
    first_step: int | None
    names: Mapping[str, Sequence[str]]
    has_same_bits: bool


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(arguments))


def run(arguments: Sequence[str]) -> int:
    """Trains, compares and prints; returns the exit status."""
    options = command_line.parse(FLAGS, arguments, about=ABOUT)
    if not options.gin_file:
        raise UserError("No experiment given. Write, for example: tfdist prove my.gin --devices=2")
    engines = [f"--{name}" for name in ("devices", "workers", "strategy") if options[name].value is not None]
    if len(engines) != 1:
        raise UserError(
            f"Received {' and '.join(engines) or 'no engine'}. Write one of --devices=2, --workers=2 and "
            "--strategy='@tfdist.Mirrored()'."
        )
    with tempfile.TemporaryDirectory(prefix="tfdist-prove-") as scratch:
        root = pathlib.Path(options.keep or scratch)
        if options.keep and root.exists() and any(root.iterdir()):
            raise UserError(f"--keep={options.keep} is not empty. Write a new directory.")
        report = _prove(options, root)
    print(json.dumps(report, indent=2) if options.json else _format_report(report, options), flush=True)
    return EXIT_DONE if report["proven"] else EXIT_NOT_PROVEN


def _prove(options: flags.FlagValues, root: pathlib.Path) -> dict[str, Any]:
    """Trains and compares; returns the report."""
    from tfdist.config import loading

    statements = loading.read_statements(gin_files=options.gin_file, gin_params=options.gin_param or [])
    common = [
        f"train.steps={options.steps}",
        "train.log_every_steps=1",
        "train.xla='off'",
        "train.sinks=[]",
        f"train.checkpoint=@tfdist.CheckpointPolicy(every_steps=1, keep_last={options.steps + 1})",
        *([] if "train.deterministic" in statements else ["train.deterministic=True"]),
    ]
    program, strategy = ["-m", "tfdist.main"], options.strategy
    if options.devices is not None:
        strategy = f"@tfdist.Mirrored(num_cpu_devices={options.devices})"
    if options.workers is not None:
        program = ["-m", "tfdist.launch", f"--workers={options.workers}", f"--launcher={options.launcher}", "--"]
        strategy = "@tfdist.Horovod()" if options.launcher == "horovod" else "@tfdist.MultiWorker()"
    sources = [f"--gin_file={path}" for path in options.gin_file]
    sources += [f"--gin_param={text}" for text in options.gin_param or []]

    def train(name: str, strategy: str, program: Sequence[str]) -> None:
        """Trains in the directory `name`; raises UserError with what a training that failed has said."""
        settings = [f"--gin_param={text}" for text in (*common, f"train.strategy={strategy}")]
        command = [sys.executable, *program, *sources, *settings, f"--run_dir={root / name}"]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.devices else {}
        done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True, check=False)
        if done.returncode != EXIT_DONE:
            raise UserError((done.stderr.strip() or done.stdout.strip()).rpartition("error: ")[2])

    train("one_device", "@tfdist.OneDevice()", ["-m", "tfdist.main"])
    tolerance = TOLERANCE_16_BITS if "16" in statements.get("train.precision", "") else TOLERANCE
    report: dict[str, Any] = {"steps": options.steps, "strategy": strategy, "tolerance": tolerance, "proven": False}
    try:
        train("engine", strategy, program)
    except UserError as error:
        return report | {"refused": str(error)}
    train("again", strategy, program)
    _cut_off(root / "engine", root / "resumed", options.steps // 2)
    train("resumed", strategy, program)
    alone, engine, again, resumed = (_read(root / name) for name in ("one_device", "engine", "again", "resumed"))
    difference = _compare(alone, engine, tolerance)
    repeats, resumes = (_compare(engine, each, tolerance).has_same_bits for each in (again, resumed))
    reasons = [] if difference.first_step is None else _explain(difference, alone, engine, repeats)
    if repeats and not resumes:
        reasons.append("A resumed training has other numbers: a state or a random generator is in no checkpoint.")
    return report | {
        "proven": difference.first_step is None and repeats and resumes,
        "difference": dict(difference.largest),
        "first_step": difference.first_step,
        "apart": {kind: list(names) for kind, names in difference.names.items()},
        "repeats": repeats,
        "resumes": resumes,
        "reasons": reasons,
    }


def _cut_off(whole: pathlib.Path, rest: pathlib.Path, step: int) -> None:
    """Copies a run as a kill after `step` would have left it."""
    shutil.copytree(whole, rest)
    directory = RunDirectory(str(rest))
    for path in (directory.result, directory.export):
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    for each, path in catalog.list_paths(str(rest / "checkpoints")):
        if each > step:
            shutil.rmtree(path)


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
    return TrainingRecord(points, dict(catalog.list_paths(str(path / "checkpoints"))), result.notes)


def _compare(one: TrainingRecord, other: TrainingRecord, tolerance: float) -> TrainingDifference:
    largest = dict.fromkeys(KINDS, 0.0)
    first_step, names, has_same_bits = None, {}, one.checkpoints.keys() == other.checkpoints.keys()
    for step in sorted(one.checkpoints.keys() & other.checkpoints.keys()):
        numbers, others = one.load_step(step), other.load_step(step)
        apart: dict[str, list[str]] = {}
        for kind in KINDS:
            ours, theirs = numbers[kind], others[kind]
            distances = {name: _measure(ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
            largest[kind] = max([largest[kind], *distances.values()])
            has_same_bits = has_same_bits and not any(distances.values())
            if beyond := [name for name, distance in distances.items() if distance > tolerance]:
                apart[kind] = sorted(beyond, key=lambda name: -distances[name])
        if apart and first_step is None:
            first_step, names = step, apart
    return TrainingDifference(largest, first_step, names, has_same_bits)


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


def _explain(difference: TrainingDifference, alone: TrainingRecord, engine: TrainingRecord, repeats: bool) -> list[str]:
    """The likely reasons why two trainings part."""
    noted = [note for note in engine.notes if note not in alone.notes]
    if noted:
        return noted
    if not repeats:
        return [
            "Each training on the engine has other numbers: something draws without a seed, reads the clock, or "
            "depends on the order of threads."
        ]
    if "seeds" in difference.names:
        return ["A layer draws more often, or less, on a replica: it draws where only some rows are, or by Python."]
    if difference.first_step == min(engine.checkpoints) and "loss and metrics" in difference.names:
        return [
            "The first loss differs already. The model or the loss computes over the rows that it gets, such as their "
            "mean or number. On a replica these are some of the batch. Or the data has other rows."
        ]
    if difference.first_step == min(engine.checkpoints):
        return [
            "The first loss is the same and the update is not: a gradient, a regularizer or an optimizer of your own "
            "depends on the rows of a replica."
        ]
    return ["The first steps agree: a layer, a callback or an optimizer keeps a state that depends on the replica."]


def _format_report(report: Mapping[str, Any], options: flags.FlagValues) -> str:
    name = f"{', '.join(options.gin_file)} on {report['strategy']}"
    if "refused" in report:
        return f"not proven: {name} does not train there:\n{report['refused']}"
    rows = [["", "largest difference"], *([kind, f"{each:.1e}"] for kind, each in report["difference"].items())]
    rows += [["two trainings there", "same bits" if report["repeats"] else "differ"]]
    rows += [["stopped in the middle and resumed", "same bits" if report["resumes"] else "differ"]]
    lines = [f"{report['steps']} steps of {name}, beside one device:", align_columns(rows, ())]
    if report["first_step"] is not None:
        apart = [f"{kind}: {', '.join(names[:MOST_SHOWN])}" for kind, names in report["apart"].items()]
        lines += [f"They part at step {report['first_step']:,}: {'; '.join(apart)}.", *report["reasons"]]
    return "\n".join([*lines, f"{'proven' if report['proven'] else 'not proven'} to {report['tolerance']:g}"])
