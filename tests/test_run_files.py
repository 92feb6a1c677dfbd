"""Whatever is in the files of a run directory, the next start goes on rightly, or ends with one message that names one.

Each case is a copy of a run with one file changed. `RUN_FILES` says what is right: a file that can be made again is
made again, a record is kept aside, and what decides what is trained is refused, and nothing is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import ANY

import keras
import numpy as np
import pytest
from equivalence.runs import assert_same_bits
from gcs.server import GcsServer
from processes import running
from support import REPOSITORY
from sweep_journals import Journal as WrittenJournal
from training.test_resume import Once, fail
from tuning.sweeps import Sweep, finish, write_experiment
from tuning.sweeps import arguments as sweep_arguments

from tfdist import main
from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.commands import verbs
from tfdist.errors import EXIT_IN_USE, UserError
from tfdist.experiment import evaluate, train
from tfdist.report import run_data
from tfdist.serving import exporting, run_export
from tfdist.serving.predicting import predict
from tfdist.serving.serving_settings import PredictSettings
from tfdist.storage import files
from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.telemetry.records import Unreadable, read_events
from tfdist.telemetry.run_directory import RUN_FILES, Policy, RunDirectory
from tfdist.training.loop.callbacks import CallbackError
from tfdist.training.recovery.rollback import Failure
from tfdist.training.run.request import Request
from tfdist.training.run.train_settings import EvaluateSettings, TrainSettings
from tfdist.tuning.find_rate import FindRateSettings, find_rate
from tfdist.tuning.schedule.journal import Journal, read_sweep

pytestmark = pytest.mark.slow

STEPS_PER_EPOCH = 3
IMAGES = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
LABELS = (IMAGES.sum(axis=1) > 0).astype(np.int32)
BINARY = bytes(range(256)) * 3
NO_FAILURE = Failure(step=1)  # changes nothing


def model() -> keras.Model:
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(2)(inputs))


def task() -> Supervised:
    return Supervised(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def run(directory: str | pathlib.Path, **changes: Any) -> list[np.ndarray] | None:
    """Trains; the weights at the end, or None where the run was finished before."""
    built: list[keras.Model] = []
    given = {
        "model": lambda: built.append(model()) or built[-1],
        "task": task(),
        "optimizer": lambda: keras.optimizers.Adam(0.01),
        "train_data": lambda: (IMAGES, LABELS),
        "strategy": OneDevice(),
        "global_batch_size": 8,
        "epochs": 3,
        "seed": 3,
        "xla": "off",
        "checkpoint": CheckpointPolicy(every_epochs=1, keep_last=2),
    }
    result = train(TrainSettings(**given | changes), Request(run_dir=str(directory), keeps=True))
    return None if result is None else built[-1].get_weights()


def evaluated(directory: str | pathlib.Path, weights: Any = "last") -> dict[str, Any]:
    settings = EvaluateSettings(
        model=model,
        task=task(),
        data=lambda: (IMAGES, LABELS),
        strategy=OneDevice(),
        global_batch_size=8,
        weights=weights,
    )
    return evaluate(settings, Request(run_dir=str(directory)))


def predicted(directory: str | pathlib.Path, images: np.ndarray = IMAGES, **changes: Any) -> np.ndarray:
    """The outputs, by the files that the mode leaves."""
    given = {"model": model, "data": lambda: images, "strategy": OneDevice(), "global_batch_size": 8}
    predict(PredictSettings(**given | {"examples_per_file": 8} | changes), Request(run_dir=str(directory)))
    parts = sorted(pathlib.Path(directory, "predictions").glob("part-*.jsonl"))
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [row["example"] for row in rows] == list(range(len(images)))
    return np.array([next(value for name, value in row.items() if name != "example") for row in rows])


@dataclasses.dataclass
class Runs:
    """A finished run and one that was killed after its second epoch; the finished one's weights."""

    finished: pathlib.Path
    killed: pathlib.Path
    weights: list[np.ndarray]

    def copy(self, which: str, to: pathlib.Path) -> pathlib.Path:
        shutil.copytree(getattr(self, which), to)
        return to


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    weights = run(folder / "finished")
    assert weights is not None
    with pytest.raises(CallbackError):
        run(folder / "killed", callbacks=[Once("on_train_batch_end", 2 * STEPS_PER_EPOCH + 1, fail)])
    (folder / "killed" / "rollbacks.json").write_text(json.dumps([dataclasses.asdict(NO_FAILURE)]))
    assert len(list((folder / "killed" / "checkpoints").iterdir())) == 2
    return Runs(folder / "finished", folder / "killed", weights)


# What a file may hold

PLAIN = {"empty": b"", "array": b"[]", "null": b"null", "number": b"7", "object": b"{}", "binary": BINARY}
DAMAGES = ("absent", *PLAIN, "half", "more", "fewer", "newer", "deep")
OF_BYTES = ("absent", "empty", "half", "binary")


def changed(content: bytes, damage: str, *, is_manifest: bool = False) -> bytes | None:
    """The content of a file with a damage; None for no file."""
    if damage == "absent":
        return None
    if damage in PLAIN:
        return PLAIN[damage]
    if damage == "half":
        return content[: len(content) // 2 - 7]
    if damage == "lines":
        lines = content.splitlines(keepends=True)
        return b"".join(lines[: len(lines) // 2])
    if damage == "deep":
        return b"[" * 200_000
    if is_manifest:
        return _changed_manifest(content, damage)
    try:
        return json.dumps(_changed(json.loads(content), damage)).encode()
    except ValueError:  # lines
        *lines, last = content.splitlines()
        return b"\n".join([*lines, json.dumps(_changed(json.loads(last), damage)).encode(), b""])


def _changed(value: Any, damage: str) -> Any:
    if isinstance(value, list):
        return [_changed(each, damage) for each in value]
    if damage == "fewer":
        gone = next(name for name in value if name != "mode")  # which may be missing
        return {name: each for name, each in value.items() if name != gone}
    return {**value, **({"novel": 1} if damage == "more" else {"format": 2})}


def _changed_manifest(content: bytes, damage: str) -> bytes:
    """With its checksum right: another version's."""
    fields = json.loads(content)
    del fields["manifest_crc32c"]
    if damage == "fewer":
        del fields["values"]["sums"]
    else:
        fields |= {"values": fields["values"] | {"novel": 1}} if damage == "more" else {"format": 2}
    body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return body + manifests._suffix(body)


def put(path: pathlib.Path, damage: str) -> bytes | None:
    """Damages a file; what it holds then."""
    content = changed(path.read_bytes(), damage, is_manifest=path.name == manifests.NAME)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    return content


def tree(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# What a start writes before it knows all: it adds to these files.
GROW = ("events.jsonl", "telemetry/worker-0.jsonl", "run.json", "config.gin")
GROW += ("events-evaluate.jsonl", "events-predict.jsonl", "events-export.jsonl")
GROW += ("telemetry/run_id",)  # of a copy


def assert_kept(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    assert before.keys() <= after.keys()
    assert {name: before[name] for name in before if name not in GROW}.items() <= after.items()


def told(directory: pathlib.Path, event: str | None, level: str = "info") -> list[str]:
    """The messages of an event's name, or of all, at a level."""
    events = read_events(RunDirectory(str(directory)), Unreadable())
    return [each.message or "" for each in events if event in (each.name, None) and each.level == level]


def warnings(directory: pathlib.Path) -> list[str]:
    return told(directory, None, "warning")


def attempt(act: Callable[..., Any], *args: Any, **changes: Any) -> tuple[str, Any]:
    """The message of status 2 with which it ends, or an empty one and what it gives. What else it raises, fails."""
    try:
        return "", act(*args, **changes)
    except UserError as error:
        assert error.exit_status == 2
        return str(error), None


def refusal(act: Callable[..., Any], *args: Any, **changes: Any) -> str:
    """The message alone."""
    return attempt(act, *args, **changes)[0]


# A training reads

READ_BY_TRAINING = {
    **dict.fromkeys(["run.json", "metrics.jsonl", "events.jsonl", "telemetry/worker-0.jsonl"], Policy.KEEP),
    **dict.fromkeys(["telemetry/run_id", "config.gin", ".lease"], Policy.REMAKE),
    "rollbacks.json": Policy.REFUSE,
}
HARMLESS = {("rollbacks.json", "array"), ("rollbacks.json", "more")}
OF_LINES = (*OF_BYTES, "newer", "deep")  # of the logs, to which a training adds


@pytest.mark.parametrize("name", READ_BY_TRAINING)
def test_a_training_goes_on_to_the_same_weights_or_names_the_file(
    runs: Runs, tmp_path: pathlib.Path, name: str
) -> None:
    policy = READ_BY_TRAINING[name]
    by_kind = {"events.jsonl": OF_LINES, "telemetry/worker-0.jsonl": OF_LINES}
    for damage in by_kind.get(name, DAMAGES if name.endswith((".json", ".jsonl")) else OF_BYTES):
        directory = runs.copy("killed", tmp_path / damage)
        path = directory / name
        if not path.exists():
            path.write_bytes(b"left by a kill")
        content = put(path, damage)
        before = tree(directory)
        refused, weights = attempt(run, directory)
        must_go_on = damage == "absent" or (name, damage) in HARMLESS or policy is not Policy.REFUSE
        is_refused = not must_go_on or (damage == "newer" and name.endswith(".json"))
        assert bool(refused) == is_refused, (damage, refused)
        if refused:
            assert str(path) in refused
            assert_kept(before, tree(directory))
            continue
        assert_same_bits(weights, runs.weights)
        if policy is Policy.KEEP and name in ("run.json", "metrics.jsonl") and damage not in ("more", "newer"):
            said = [each for each in warnings(directory) if str(path) in each]
            assert len(said) == 1 or (name == "metrics.jsonl" and damage == "fewer"), (damage, said)
            if damage != "absent" and (name == "run.json" or damage == "binary"):
                assert (directory / f"{name}.damaged").read_bytes() == content
        points = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        places = [(point["step"], point["split"]) for point in points]
        assert len(set(places)) == len(places) and places[-1][0] == 3 * STEPS_PER_EPOCH


@pytest.mark.parametrize("name", [manifests.NAME, "data"])
def test_one_damaged_checkpoint_is_passed_over_and_one_of_a_newer_format_refused(
    runs: Runs, tmp_path: pathlib.Path, name: str
) -> None:
    for damage in DAMAGES if name == manifests.NAME else OF_BYTES:
        directory = runs.copy("killed", tmp_path / damage)
        newest = max((directory / "checkpoints").iterdir())
        path = next(newest.glob(f"{name}*"))
        put(path, damage)
        before = tree(directory)
        refused, weights = attempt(run, directory)
        assert bool(refused) == (name == manifests.NAME and damage in ("newer", "fewer")), (damage, refused)
        if refused:
            assert ("of format 2" in refused and str(newest) in refused) or "step 6 is of another version" in refused
            assert_kept(before, tree(directory))
            with pytest.raises(UserError, match="of format 2") if damage == "newer" else contextlib.nullcontext():
                evaluated(directory)
        else:
            assert_same_bits(weights, runs.weights)


@pytest.mark.parametrize("damage", ["half", "binary", "newer"])
def test_checkpoints_none_of_which_can_be_read_end_the_run_and_stay(
    runs: Runs, tmp_path: pathlib.Path, damage: str
) -> None:
    """A1 and A2, and an evaluation of them."""
    directory = runs.copy("killed", tmp_path / "run")
    for each in (directory / "checkpoints").iterdir():
        put(each / manifests.NAME, damage)
    before = tree(directory / "checkpoints")
    for act, changes in ((run, {}), (evaluated, {}), (run, {"accept_changes": True})):
        refused = refusal(act, directory, **changes)
        assert str(directory) in refused and ("of format 2" if damage == "newer" else "is whole") in refused
        assert tree(directory / "checkpoints") == before
    shutil.move(directory / "checkpoints", tmp_path / "away")  # as the message says
    if damage != "newer":
        assert_same_bits(run(directory), runs.weights)


def test_a_checkpoint_of_a_newer_format_outlives_the_training(runs: Runs, tmp_path: pathlib.Path) -> None:
    directory = runs.copy("killed", tmp_path / "run")
    oldest = min((directory / "checkpoints").iterdir())
    put(oldest / manifests.NAME, "newer")
    before = tree(oldest)
    assert_same_bits(run(directory), runs.weights)
    assert tree(oldest) == before


@pytest.mark.parametrize(
    "values", [{"sums": {"weight": "x"}}, {"random": {"python": [3, [1], None], "numpy": {}}}, {"stop": None}]
)
def test_a_checkpoint_of_another_version_is_one_message(
    runs: Runs, tmp_path: pathlib.Path, values: dict[str, Any]
) -> None:
    directory = runs.copy("killed", tmp_path / "run")
    path = max((directory / "checkpoints").iterdir()) / manifests.NAME
    kept = manifests.decode(path.read_bytes())
    path.write_bytes(manifests.encode(dataclasses.replace(kept, values={**kept.values, **values})))
    assert "The checkpoint of step 6 is of another version of tfdist" in refusal(run, directory)


def test_a_result_is_believed_or_refused(runs: Runs, tmp_path: pathlib.Path) -> None:
    for damage in DAMAGES:
        directory = runs.copy("finished", tmp_path / damage)
        put(directory / "result.json", damage)
        before = tree(directory)
        refused, weights = attempt(run, directory)
        assert bool(refused) == (damage not in ("absent", "more", "fewer")), (damage, refused)
        if refused:
            assert str(directory / "result.json") in refused and before.items() <= tree(directory).items()
        elif damage == "absent":
            assert_same_bits(weights, runs.weights)
        else:
            assert weights is None
    for field, value in (("steps_per_epoch", "9"), ("starts", 5), ("best", [1]), ("epochs", True)):
        directory = runs.copy("finished", tmp_path / field)
        content = json.loads((directory / "result.json").read_text()) | {field: value}
        (directory / "result.json").write_text(json.dumps(content))
        assert f"result.json is damaged: {field} is " in refusal(run, directory)
        assert run_data.read_run(str(directory)).result is None


@pytest.mark.parametrize(
    "starts",
    [5, [{"step": 0}], [{"time": "2026-01-01T00:00:00+00:00"}], [{"time": "x", "step": 0}], "no zone"],
)
def test_starts_that_nobody_writes_begin_again(runs: Runs, tmp_path: pathlib.Path, starts: Any) -> None:
    """B4: found at the start, not after the training."""
    directory = runs.copy("killed", tmp_path / "run")
    has_no_zone = starts == "no zone"
    starts = [{"time": "2026-01-01T00:00:00", "step": 0}] if has_no_zone else starts
    (directory / "run.json").write_text(json.dumps({"settings": {}, "starts": starts}))
    assert evaluated(directory)["loss"] > 0
    assert run_data.read_run(str(directory)).starts is not None
    assert_same_bits(run(directory), runs.weights)
    assert (directory / "run.json.damaged").exists() != has_no_zone
    assert len(json.loads((directory / "result.json").read_text())["starts"]) == (2 if has_no_zone else 1)


def test_half_a_last_line_goes_and_the_steps_without_rows_are_named(runs: Runs, tmp_path: pathlib.Path) -> None:
    """A10."""
    directory = runs.copy("killed", tmp_path / "run")
    content = (directory / "metrics.jsonl").read_bytes().splitlines()
    (directory / "metrics.jsonl").write_bytes(content[0] + b"\n" + content[1][:20])
    assert_same_bits(run(directory), runs.weights)
    lines = (directory / "metrics.jsonl").read_bytes().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines) and not list(directory.glob("*.damaged"))
    (said,) = [each for each in warnings(directory) if "metrics.jsonl" in each]
    assert "ends in half a line" in said and "no rows of the steps from 4 to 6" in said


def test_a_start_sweeps_what_a_killed_writer_left_and_nothing_of_another_mode(
    runs: Runs, tmp_path: pathlib.Path
) -> None:
    directory = runs.copy("killed", tmp_path / "run")
    stale = [".run.json.0123456789ab.tfdist-tmp", "export/.model.keras.0123456789ab.tfdist-tmp"]
    live = ["predictions/.part-00000.jsonl.0123456789ab.tfdist-tmp", ".evaluation.json.0123456789ab.tfdist-tmp"]
    for name in stale + live:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"half")
    assert_same_bits(run(directory), runs.weights)
    assert [name for name in stale + live if (directory / name).exists()] == live
    predicted(directory)
    assert [name for name in live if (directory / name).exists()] == live[1:]


def test_a_run_that_has_more_steps_than_are_asked_for_says_so(runs: Runs, tmp_path: pathlib.Path) -> None:
    directory = runs.copy("killed", tmp_path / "run")
    assert run(directory, epochs=1) is not None
    (resumed,) = told(directory, "resumed")
    assert "That is more than the 3 steps that are asked for. Nothing is left to train." in resumed
    result = json.loads((directory / "result.json").read_text())
    assert (result["steps"], result["epochs"]) == (2 * STEPS_PER_EPOCH, 2)


def test_a_finished_run_misses_its_model(runs: Runs, tmp_path: pathlib.Path) -> None:
    directory = runs.copy("finished", tmp_path / "run")
    (directory / "export" / "model.keras").unlink()
    assert run(directory) is None
    assert "model.keras is missing; remove" in told(directory, "already_finished")[-1]
    (directory / "result.json").unlink()  # as the message says
    assert_same_bits(run(directory), runs.weights)
    assert (directory / "export" / "model.keras").exists()


# An evaluation, a prediction, a plan, a report read


def test_predictions_are_taken_up_only_as_they_were_written(runs: Runs, tmp_path: pathlib.Path) -> None:
    """A12."""
    directory = runs.copy("finished", tmp_path / "run")
    whole = predicted(directory)
    before = tree(directory / "predictions")
    for damage in OF_BYTES:
        put(directory / "predictions" / "part-00001.jsonl", damage)
        np.testing.assert_array_equal(predicted(directory), whole)
        assert tree(directory / "predictions") == before


def test_predictions_of_other_examples_of_that_name_and_number_are_made_again(
    runs: Runs, tmp_path: pathlib.Path
) -> None:
    """A4; and what was moved is known again."""
    directory = runs.copy("finished", tmp_path / "run")
    whole = predicted(directory)
    other = predicted(directory, IMAGES[::-1])
    np.testing.assert_array_equal(other, predicted(runs.copy("finished", tmp_path / "fresh"), IMAGES[::-1]))
    np.testing.assert_allclose(other, whole[::-1], rtol=1e-5, atol=1e-6)  # kernels compute a batch's last rows apart
    again = predicted(directory)
    moved = tmp_path / "moved"
    shutil.copytree(directory, moved)
    part = moved / "predictions" / "part-00000.jsonl"
    first = part.stat().st_mtime_ns
    np.testing.assert_array_equal(predicted(moved), again)
    assert part.stat().st_mtime_ns == first


# As they are typed

EXPERIMENT = {
    "typed.py": """
import os
import signal
import time
import types

import keras
import numpy as np


def build(hp):
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(hp.Int("units", 2, 8, default=4))(inputs)))


def rows(gate=None, kill=None):
    if kill:
        kill_at(*kill)
    return Rows(gate)


class Rows:
    \"\"\"24 examples, the later ones of which come only when the file `gate` is there.\"\"\"

    def __init__(self, gate):
        self.gate = gate

    def __len__(self):
        return 24

    def __getitem__(self, number):
        while number > 11 and self.gate and not os.path.exists(self.gate):
            open(f"{self.gate}.reached", "w").close()
            time.sleep(0.01)
        return np.full(2, number, np.float32), number % 2


def kill_at(call, name):
    \"\"\"Has this process kill itself when it asks the system for a call about a file of this name.\"\"\"
    from tfdist.serving import exporting, run_export
    from tfdist.storage import local_files

    def killing(*arguments):
        if any(name in str(each) for each in arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return done(*arguments)

    local_files.os = types.SimpleNamespace(**vars(os))
    place = local_files if call == "exchange" else local_files.os
    done = getattr(place, call)
    setattr(place, call, killing)
    exporting._run_in_process = lambda kind, path, inputs, _: run_export.RUNS[kind](path, inputs)
""",
    "small.gin": """
from __gin__ import dynamic_registration
import keras
import typed
from tfdist.checkpoint import policy
from tfdist.data.sources import columns
from tfdist.data.tables import tables
from tfdist.strategies import one_device
from tfdist.tasks import supervised

train.model = @typed.build
train.hyperparameters = {'units': 3}
train.task = @supervised.Supervised()
train.optimizer = @keras.optimizers.Adam
train.train_data = @tables.Table
train.eval_data = @tables.Table
train.strategy = @one_device.OneDevice()
train.global_batch_size = 8
train.epochs = 3
train.seed = 3
train.checkpoint = @policy.CheckpointPolicy()
policy.CheckpointPolicy.every_epochs = 1
supervised.Supervised.loss = @keras.losses.SparseCategoricalCrossentropy()
keras.losses.SparseCategoricalCrossentropy.from_logits = True
keras.optimizers.Adam.learning_rate = 0.01
tables.Table.files = 'FOLDER/rows.csv'
tables.Table.fitted_on = 'FOLDER/rows.csv'
tables.Table.columns = @columns.Columns()
tables.Table.standardize = True
tables.Table.stack_inputs = True
columns.Columns.inputs = ['a', 'b']
columns.Columns.targets = 'kind'
predict.data = @tables.Table
export.data = @tables.Table
""",
    "rows.csv": "a,b,kind\n" + "".join(f"{a:.3f},{b:.3f},{'xy'[int(a > b)]}\n" for a, b in IMAGES[:, :2]),
}


@dataclasses.dataclass
class Typed:
    """Types commands about runs of the experiment in `folder`, which holds a finished and an unfinished one."""

    folder: pathlib.Path

    def __call__(self, mode: str, directory: str | pathlib.Path, *more: str) -> tuple[int, str]:
        """The exit status, and what is printed."""
        printed = io.StringIO()
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            pytest.MonkeyPatch.context() as p,
        ):
            p.syspath_prepend(str(self.folder))
            p.setattr(exporting, "_run_in_process", lambda kind, path, inputs, _: run_export.RUNS[kind](path, inputs))
            if mode in ("report", "list"):
                of = [str(directory)] if mode == "report" else ["--list", str(pathlib.Path(directory).parent)]
                return verbs.run(["report", *of]), printed.getvalue()
            return main.main(self.arguments(mode, directory, *more)), printed.getvalue()

    def arguments(self, mode: str, directory: str | pathlib.Path, *more: str) -> list[str]:
        """After `python -m tfdist.main`; what uses a trained model has its configuration from the run."""
        arguments = [f"--mode={mode}", f"--run_dir={directory}", *more]
        if more or mode not in ("evaluate", "predict", "export"):
            arguments.append(f"--gin_file={self.folder}/small.gin")
        return [*arguments, f"--from_run={directory}", "--devices=l4:1"] if mode == "plan" else arguments

    def answer(self, mode: str, directory: str | pathlib.Path) -> Any:
        """What a command found."""

        def read(name: str) -> Any:
            return json.loads(files.read(files.join(directory, name)))

        match mode:
            case "train":
                return read("result.json")["eval_metrics"]
            case "evaluate":
                found = read("evaluation.json")
                del found["evaluated"]["weights"]  # their path
                return found
            case "predict":
                parts = sorted(n for n in files.list_names(files.join(directory, "predictions")) if "part" in n)
                return [files.read(files.join(directory, "predictions", name)) for name in parts]
            case "export":
                return read("export/report.json")["exports"]["saved_model"]["largest_difference"]
            case "plan":
                return read("plan.json")["performance_targets"]
            case "find_rate":
                return read("find_rate.json")
        return files.exists(files.join(directory, "report/index.html"))


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Typed:
    folder = tmp_path_factory.mktemp("typed")
    for name, text in EXPERIMENT.items():
        (folder / name).write_text(text.replace("FOLDER", str(folder)))
    typed = Typed(folder)
    assert typed("train", folder / "finished")[0] == 0
    assert typed("train", folder / "unfinished", "--gin_param=train.stop_after_epochs = 2")[0] == 0
    for mode in ("evaluate", "predict", "export"):
        assert typed(mode, folder / "finished")[0] == 0, mode
    for run in (folder / "finished", folder / "unfinished"):
        (run / "tuned.json").write_text('{"xla": "off", "seconds_per_step": {"off": 1.0}}')
        (run / "rollbacks.json").write_text(json.dumps([dataclasses.asdict(NO_FAILURE)]))
    return typed


def file_of(directory: pathlib.Path, name: str) -> pathlib.Path:
    return next((directory / "fitted").iterdir()) if name == "fitted/" else directory / name


OLDER = set(DAMAGES) - {"newer"}
TRAINED: dict[str, set[str]] = {
    "fitted/": {"more"},
    "hyperparameters.json": {"more"},
    "run.json": OLDER,
    "config.gin": set(),
    "export/model.keras": set(),
}
# By command: the files that it reads, and with which damages it goes on; others end it.
READ_BY_COMMANDS: dict[str, dict[str, set[str]]] = {
    "train": {"fitted/": {"more"}, "tuned.json": OLDER},
    "evaluate": TRAINED,
    "predict": TRAINED | {"predictions/predictions.json": OLDER},
    "export": TRAINED,
    "plan": {"result.json": {"more", "fewer"}},
    "report": {"result.json": OLDER, "run.json": OLDER},
    "list": {"result.json": {*DAMAGES}, "run.json": set(DAMAGES) - {"absent"}},
}
KNOWN = {
    *("fitted/", "hyperparameters.json", "tuned.json", "rollbacks.json", "result.json", "run.json", "evaluation.json"),
    *("metrics.jsonl", "events.jsonl", "telemetry/worker-0.jsonl", "telemetry/run_id"),
}


READ_AS_OTHERS = ("predict", "export", "report")  # by the same code; each is tried with FEW_DAMAGES alone
FEW_DAMAGES = ("absent", "half", "lines", "more", "newer")


def damages_of(name: str) -> Sequence[str]:
    """Those with which a whole command is tried; without a file of fitted values they are fitted anew."""
    if name == "config.gin":
        return "absent", "empty", "binary", "half", "lines"
    return (
        OF_BYTES if name.endswith((".keras", "run_id")) else [each for each in DAMAGES if (name, each) != FITTED_ANEW]
    )


FITTED_ANEW = ("fitted/", "absent")


@pytest.mark.parametrize("mode", READ_BY_COMMANDS)
def test_a_command_finds_the_same_or_names_the_file(typed: Typed, tmp_path: pathlib.Path, mode: str) -> None:
    run, directory = typed.folder / ("unfinished" if mode == "train" else "finished"), tmp_path / "runs" / "run"
    read = READ_BY_COMMANDS[mode]
    others = {"result.json", "run.json", "rollbacks.json"} if mode == "train" else set()  # which the tests above damage
    unread = sorted(KNOWN - read.keys() - others)

    def find(names: Sequence[str], damage: str) -> tuple[int, str, Any]:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(run, directory)
        for path in (file_of(directory, name) for name in names if damage in damages_of(name)):
            if path.exists():
                put(path, damage)
        before = tree(directory)
        status, printed = typed(mode, directory)
        if status:
            assert_kept(before, tree(directory))
        return status, printed, typed.answer(mode, directory) if not status else None

    status, printed, whole = find([], "")
    assert status == 0, printed
    for damage in ("binary", "absent", "newer"):
        assert find(unread, damage) == (0, ANY, whole), damage
    for name, goes_on in read.items():
        for damage in damages_of(name):
            if mode in READ_AS_OTHERS and damage not in FEW_DAMAGES:
                continue
            status, printed, found = find([name], damage)
            assert status == (0 if damage in goes_on else 2), (name, damage, printed)
            assert found == whole if not status else file_of(run, name).name in printed, (name, damage, printed)


# Others


@pytest.mark.parametrize("damage", [*DAMAGES, "first line gone", "line without asked", "half a line in the middle"])
def test_a_journal_is_read_or_refused(tmp_path: pathlib.Path, damage: str) -> None:
    """B8; a chief reads all or nothing, a report what it can."""
    written = WrittenJournal().begin()
    for name in ("0000", "0001"):
        written.start(name).report(name, 1, 0.5).end(name, 0.5)
    for number, event in enumerate(written.events[1:]):
        event["asked"] = number
    path = pathlib.Path(written.write(tmp_path), "sweep.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "first line gone":
        path.write_bytes(b"".join(lines[1:]))
    elif damage == "line without asked":
        path.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b'"asked"', b'"novel"')]))
    elif damage == "half a line in the middle":
        path.write_bytes(b"".join([*lines[:2], lines[2][:9] + b"\n", *lines[3:]]))
    else:
        put(path, damage)
    before = path.read_bytes() if path.exists() else None
    refused, events = attempt(Journal(str(tmp_path)).read)
    is_torn = damage in ("empty", "array", "null", "number", "half", "deep")
    assert bool(refused) == (damage not in ("absent", "more") and not is_torn), refused
    assert not refused or str(path) in refused
    assert (path.read_bytes() if path.exists() else None) == before
    if before is not None and damage != "newer":
        read_sweep(str(tmp_path))
    if is_torn:
        journal = Journal(str(tmp_path))
        started = {"trial": "0002", "rung": 0, "values": {}, "asked": 9}
        journal.write("trial_started" if events else "sweep_started", **(started if events else written.header))
        journal.close()
        assert len(Journal(str(tmp_path)).read()) == len(events) + 1


# Two processes

GATED = {
    "train": ("train.train_data = @typed.rows", "train.xla = 'off'"),
    "evaluate": ("evaluate.data = @typed.rows",),
    "predict": ("predict.data = @typed.rows", "predict.global_batch_size = 8", "predict.examples_per_file = 8"),
    "export": ("export.data = @typed.rows", "export.num_examples = 20"),
    "find_rate": ("train.train_data = @typed.rows", "train.xla = 'off'", "find_rate.steps = 10"),
}


def processes_of(typed: Typed, mode: str, directory: pathlib.Path) -> tuple[list[str], pathlib.Path]:
    """The parameters of a command whose data come up to the middle until there is a file, and that file."""
    gate = directory.with_name("gate")
    return [f"--gin_param={each}" for each in (*GATED[mode], f"typed.rows.gate = '{gate}'")], gate


@pytest.mark.parametrize("mode", ["evaluate", "predict", "export", "find_rate"])
def test_a_second_process_names_the_first_and_what_a_kill_leaves_is_not_taken_for_whole(
    typed: Typed, tmp_path: pathlib.Path, mode: str
) -> None:
    directory, whole = tmp_path / "run", tmp_path / "whole"
    parameters, gate = processes_of(typed, mode, directory)
    for each in (directory, whole):
        shutil.copytree(typed.folder / "finished", each)
    with running(typed.arguments(mode, directory, *parameters), tmp_path / "log") as first:
        first.until(gate.with_name("gate.reached").exists)
        status, printed = typed(mode, directory, *parameters)
        owner = "a training" if mode == "find_rate" else f"--mode={mode}"
        assert status == EXIT_IN_USE, printed
        assert f"is in use by {owner} (host {socket.gethostname()}, process {first.pid}, " in printed
        first.kill()
    gate.touch()
    for each in (directory, whole):
        assert typed(mode, each, *parameters) == (0, ANY)
    assert typed.answer(mode, directory) == typed.answer(mode, whole)
    assert not list(directory.rglob("*tfdist-tmp*")) and not (directory / "find_rate").exists()


def test_other_modes_run_beside_a_training_and_a_second_one_is_refused(typed: Typed, tmp_path: pathlib.Path) -> None:
    directory, whole = tmp_path / "run", tmp_path / "whole"
    parameters, gate = processes_of(typed, "train", directory)
    gate.touch()
    assert typed("train", whole, *parameters)[0] == 0
    assert typed("train", directory, *parameters, "--gin_param=train.stop_after_epochs = 1")[0] == 0
    gate.unlink()
    with running(typed.arguments("train", directory, *parameters), tmp_path / "log") as first:
        first.until(gate.with_name("gate.reached").exists)
        before = tree(directory)
        status, printed = typed("train", directory, *parameters)
        assert status == EXIT_IN_USE and f"a training (host {socket.gethostname()}, process {first.pid}, " in printed
        for mode in ("evaluate", "predict", "export", "report"):
            assert typed(mode, directory, f"--gin_param={mode}.weights = 'last'") == (0, ANY)
        after = tree(directory)
        assert [name for name in before if after.get(name) != before[name]] in ([], ["telemetry/worker-0.jsonl"])
        gate.touch()
        assert first.end() == 0, first.output
    assert typed.answer("train", directory) == typed.answer("train", whole)


@pytest.mark.parametrize(("call", "name"), [("exchange", "saved_model"), ("replace", "report.json")])
def test_an_export_that_is_killed_leaves_a_whole_one(
    typed: Typed, tmp_path: pathlib.Path, call: str, name: str
) -> None:
    """A9: the earlier export or the new one is there; tests/storage/test_crashes.py ends it at every other call."""
    directory = tmp_path / "run"
    shutil.copytree(typed.folder / "finished", directory)
    inputs = {"inputs": IMAGES[:, :2]}
    (whole,) = run_export.run_saved_model(str(directory / "export" / "saved_model"), inputs).values()
    killed = ["--gin_param=export.data = @typed.rows", f"--gin_param=typed.rows.kill = {(call, name)!r}"]
    with running(typed.arguments("export", directory, *killed), tmp_path / "log") as process:
        assert process.end() == -signal.SIGKILL, process.output
    (found,) = run_export.run_saved_model(str(directory / "export" / "saved_model"), inputs).values()
    np.testing.assert_array_equal(found, whole)
    assert typed("export", directory) == (0, ANY)
    assert not list(directory.rglob("*tfdist-tmp*"))


@pytest.mark.parametrize("damage", ["half", "binary"])
def test_a_sweep_finds_the_same_or_names_its_journal(swept: pathlib.Path, tmp_path: pathlib.Path, damage: str) -> None:
    directory = tmp_path / "sweep"
    shutil.copytree(swept, directory)
    (directory / "result.json").unlink()
    put(directory / "sweep.jsonl", damage)
    assert verbs.run(["report", str(directory)]) in (0, 2)
    before = tree(directory)
    with running(sweep_arguments(swept.parent / "tiny.gin", directory, *GRID), tmp_path / "log") as chief:
        status = chief.end()
    assert status == (2 if damage == "binary" else 0), chief.output
    if status:
        assert str(directory / "sweep.jsonl") in chief.output and before.items() <= tree(directory).items()
    else:
        assert [each[:3] for each in Sweep(directory).outcomes.values()] == [
            each[:3] for each in Sweep(swept).outcomes.values()
        ]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished sweep of two trials."""
    folder = tmp_path_factory.mktemp("swept")
    finish(sweep_arguments(write_experiment(folder), folder / "sweep", *GRID), folder / "log")
    return folder / "sweep"


GRID = (
    "tune.search = @search.Grid()",
    "tune.space = {'keras.optimizers.SGD.learning_rate': @space.choice(values=[0.1, 0.2])}",
)


# Scratch and leases


def test_a_fast_check_checks_whatever_an_earlier_one_left(runs: Runs, tmp_path: pathlib.Path) -> None:
    """A7, A8: killed after its training, with the same settings and with others."""
    shutil.copytree(runs.finished, tmp_path / "run" / "fast_check")
    shown: list[str] = []

    class Console:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: shown.extend(map(str, args)) if name == "message" else None

    settings = {"model": model, "task": task(), "optimizer": "sgd", "train_data": lambda: (IMAGES, LABELS)}
    made = TrainSettings(**settings, strategy=OneDevice(), global_batch_size=4, epochs=1, fast_check=True)
    request = Request(run_dir=str(tmp_path / "run"), settings=lambda: {"train.seed": "9"}, console=lambda _: Console())
    train(made, request)
    assert "all parts of the training have run; a checkpoint gave back all" in shown[-1]
    assert not (tmp_path / "run" / "fast_check").exists()


def test_a_range_test_tries_rates_whatever_an_earlier_one_left(runs: Runs, tmp_path: pathlib.Path) -> None:
    """A6: killed after its training."""
    shutil.copytree(runs.finished, tmp_path / "run" / "find_rate")
    settings = {"model": model, "task": task(), "optimizer": "sgd", "train_data": lambda: (IMAGES, LABELS)}
    made = TrainSettings(**settings, strategy=OneDevice(), global_batch_size=8, epochs=1, xla="off")
    told: list[str] = []
    found = find_rate(FindRateSettings(steps=10), made, Request(run_dir=str(tmp_path / "run")), train, told.append)
    assert len(found.losses) == 10 and not any("not finite" in each for each in told)
    assert not (tmp_path / "run" / "find_rate").exists()


# On gs://


def in_bucket(directory: pathlib.Path, name: str) -> str:
    """Puts a copy of a directory into the bucket."""
    for each, content in tree(directory).items():
        files.write_atomic(f"gs://bucket/{name}/{each}", content)
    return f"gs://bucket/{name}"


@pytest.mark.parametrize(
    ("mode", "name", "damage", "goes_on"),
    [
        ("plan", "result.json", "newer", False),
        ("report", "run.json", "null", True),
        ("export", "config.gin", "empty", False),
    ],
)
def test_commands_do_in_a_bucket_as_on_a_disk(
    typed: Typed, gcs: GcsServer, mode: str, name: str, damage: str, goes_on: bool
) -> None:
    run = typed.folder / "finished"
    whole, directory = in_bucket(run, "whole"), in_bucket(run, "run")
    assert typed(mode, whole) == (0, ANY)
    path = files.join(directory, str(file_of(run, name).relative_to(run)))
    content = changed(files.read(path), damage)
    files.remove(path) if content is None else files.write_atomic(path, content)
    before = files.list_tree(directory)
    status, printed = typed(mode, directory)
    assert status == (0 if goes_on else 2), printed
    if goes_on:
        assert typed.answer(mode, directory) == typed.answer(mode, whole)
    else:
        assert path in printed and set(before) <= set(files.list_tree(directory))


def test_in_a_bucket_it_is_the_same(runs: Runs, gcs: GcsServer) -> None:
    cases = [("run.json", "half"), ("run.json", "newer"), ("metrics.jsonl", "half"), ("rollbacks.json", "binary")]
    for name, damage in [*cases, ("manifests", "half"), ("manifests", "newer")]:
        directory = in_bucket(runs.killed, f"{name}-{damage}")
        tried = [name] if name != "manifests" else [n for n in files.list_tree(directory) if n.endswith(manifests.NAME)]
        for each in tried:
            path = files.join(directory, each)
            content = changed(files.read(path), damage, is_manifest=name == "manifests")
            assert content is not None
            files.write_atomic(path, content)
        before = {each: files.read(files.join(directory, each)) for each in files.list_tree(directory)}
        refused, weights = attempt(run, directory)
        assert bool(refused) == (name in ("rollbacks.json", "manifests") or damage == "newer"), (name, damage, refused)
        if refused:
            assert directory in refused
            after = {each: files.read(files.join(directory, each)) for each in files.list_tree(directory)}
            assert_kept(before, after)
        else:
            assert_same_bits(weights, runs.weights)


def test_a_tree_in_a_bucket_is_valid_or_not_there(gcs: GcsServer, tmp_path: pathlib.Path) -> None:
    """A9: what makes it valid comes last, and is not there while the rest changes."""
    for name in ("saved_model.pb", "variables/index", "variables/data"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    files.write_atomic("gs://bucket/m/saved_model.pb", b"old")
    files.write_atomic("gs://bucket/m/assets/old", b"old")
    order: list[tuple[str, bool]] = []
    original = files._GCS.write_atomic

    def write(path: str, data: bytes) -> None:
        order.append((path.removeprefix("gs://bucket/m/"), files.exists("gs://bucket/m/saved_model.pb")))
        original(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files._GCS, "write_atomic", write, raising=False)
        files.replace_tree("gs://bucket/m", str(tmp_path), last="saved_model.pb")
    assert [name for name, _ in order][-1] == "saved_model.pb" and not any(there for _, there in order)
    assert files.list_tree("gs://bucket/m") == ["saved_model.pb", "variables/data", "variables/index"]


# The page


def test_the_page_shows_the_tables() -> None:
    page = (REPOSITORY / "docs" / "run_directory.md").read_text()
    section = page.partition("## Damaged and newer files")[2].partition("\n## ")[0]
    for policy in Policy:
        part = section.partition(f"**If damaged: {policy.value}**")[2].partition("**If damaged")[0]
        cells = [(f"`{file.name}`", file.content, file.advice) for file in RUN_FILES if file.policy is policy]
        rows = [f"| {' | '.join(row[:2] if policy is Policy.REMAKE else row)} |" for row in cells]
        assert [line for line in part.splitlines() if line.startswith("| `")] == rows
