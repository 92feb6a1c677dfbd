"""What is wrong in a sweep's settings is said at once, in one message, in --mode=validate too."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest
from support import Finished
from tuning.sweeps import arguments

from tfdist.errors import EXIT_IN_USE, UserError
from tfdist.storage import lease
from tfdist.tuning.schedule import sweep

pytestmark = pytest.mark.slow

RATE = "keras.optimizers.SGD.learning_rate"
UNDER_ADAM = "{'train.optimizer': ['@keras.optimizers.Adam']}"
UNDER_SGD = "{'train.optimizer': ['@keras.optimizers.SGD']}"
UNIFORM = "@space.uniform(low=0.1, high=1.0)"


@pytest.fixture
def answer(
    answer: Callable[..., Finished], gin_file: pathlib.Path, tmp_path: pathlib.Path
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Calls `main` in this process: the status, and what went to standard error."""

    def call(*parameters: str, mode: str = "validate") -> tuple[int, str]:
        told = answer(*arguments(gin_file, tmp_path / "run", *parameters, mode=mode))
        return told.status, told.stderr

    yield call
    sys.modules.pop("tiny", None)


def test_a_sweep_elsewhere_than_on_linux_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="--mode=tune starts trials on Linux only; this is 'darwin'"):
        sweep.tune(None, None, None)


def test_a_sweep_that_is_right_is_valid_and_trains_nothing(
    answer: Callable[..., tuple[int, str]], tmp_path: pathlib.Path
) -> None:
    assert answer("tune.max_trials = 3") == (0, "")
    assert not (tmp_path / "run").exists()


def test_a_choice_may_be_of_functions_each_with_settings_of_its_own(answer: Callable[..., tuple[int, str]]) -> None:
    ranges = {
        "train.optimizer": "@space.choice(values=['@keras.optimizers.SGD', '@keras.optimizers.Adam'])",
        "keras.optimizers.Adam.beta_1": f"@space.uniform(low=0.5, high=0.9, under={UNDER_ADAM})",
        RATE: UNIFORM.replace(")", f", under={UNDER_SGD})"),
    }
    space = ", ".join(f"{path!r}: {text}" for path, text in ranges.items())
    assert answer("tune.max_trials = 3", f"tune.space = {{{space}}}") == (0, "")


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (f"tune.space = {{'keras.optimizers.SGD.learning_rat': {UNIFORM}}}", "Did you mean 'learning_rate'?"),
        (f"tune.space = {{'OPTIMISER': {UNIFORM}}}", "nothing that is used refers to %OPTIMISER"),
        (f"tune.space = {{'keras.optimizers.Adam.beta_1': {UNIFORM}}}", "nothing that is used refers to"),
        ("tune.space = {'train.optimizer': @space.choice(values=['@keras.optimizers.Adem'])}", "Did you mean 'Adam"),
        (f"tune.space = {{'{RATE}': @space.uniform(low=1.0, high=0.1)}}", f"tune.space['{RATE}']: the range is empty"),
        (f"tune.space = {{'train.stop_after_epochs': {UNIFORM}}}", "cannot be searched"),
        (
            "tune.search = @search.AshaStopping()\ntune.space = {'train.epochs': @space.choice(values=[2, 8])}",
            "tune.space['train.epochs']: this is set by the rungs of tune.search and cannot be searched.",
        ),
        ("tune.search = @search.Rand()", "Did you mean 'Random'"),
        ("tune.search = 'random'", "@search.Random()"),
        ("tune.objective = 'val_quality'", "tune.direction"),
        ("tune.direction = 'up'", "tune.direction is 'up'; write one of 'max', 'min', or None."),
        ("tune.objective = 'val_acuracy'\ntune.direction = 'max'", "Reported: loss, sparse_categorical_accuracy, val_"),
        ("tune.search = @search.AshaStopping()\ntrain.eval_every = 2", "train.eval_every = 2 leaves epochs out. Leave"),
        ("tune.workers_per_trial = 2", "which is of one. Write @multi_worker.MultiWorker()"),
    ],
)
def test_what_is_wrong_is_one_message_and_status_2(
    answer: Callable[..., tuple[int, str]], parameter: str, expected: str
) -> None:
    status, said = answer("tune.max_trials = 3", *parameter.split("\n"))
    assert status == 2 and said.startswith("error: ") and said.count("error: ") == 1, said
    assert expected in said and "Traceback" not in said


ON_RAY = "write tune.executor = @executor.Ray()"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}', ON_RAY),
        ("OMPI_COMM_WORLD_RANK", "0", "tune.workers_per_trial"),
    ],
)
def test_one_of_several_processes_is_told_how_a_sweep_has_several(
    answer: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    status, said = answer("tune.max_trials = 3", mode="tune")
    assert status == 2 and f"{name} is set" in said and expected in said, said


def test_a_directory_that_another_sweep_uses_is_refused(
    answer: Callable[..., tuple[int, str]], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "run").mkdir()
    held = lease.acquire(tmp_path / "run", owner="a sweep", wait_seconds=0.0, notify=print)
    try:
        status, said = answer("tune.max_trials = 3", mode="tune")
    finally:
        held.release()
    assert status == EXIT_IN_USE and "is in use by a sweep" in said and said.endswith(" [run-in-use]\n"), said


@pytest.mark.parametrize("held", ["result.json", "run.json", "metrics.jsonl"])
def test_a_sweep_leaves_the_directory_of_a_training_alone(
    answer: Callable[..., tuple[int, str]], tmp_path: pathlib.Path, held: str
) -> None:
    (tmp_path / "run").mkdir()
    content = '{"status": "done", "steps": 7, "epochs": 1}'
    (tmp_path / "run" / held).write_text(content)
    status, said = answer("tune.max_trials = 3", mode="tune")
    assert status == 2 and f"{tmp_path / 'run'} holds a training ({held}), and this is a sweep" in said
    assert (tmp_path / "run" / held).read_text() == content
    assert not (tmp_path / "run" / "sweep.jsonl").exists()
