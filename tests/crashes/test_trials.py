"""Runs whose trial of XLA has begun end before their time, and go on: with as many workers, fewer, more, other ones."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from crashes.kills import LOST_PEER, PREEMPTED
from crashes.runs import FITTED, MAIN, TOLERANCE, TOTAL_STEPS, TRIALS, Process, Run, Undisturbed, differences

pytestmark = pytest.mark.slow

MULTI_WORKER, HOROVOD, ONE_DEVICE = "multi_worker", "horovod", "one_device"
TERM, KILL_CHIEF, KILL_OTHER, KILL_ALL = "SIGTERM", "SIGKILL of the chief", "SIGKILL of the other", "SIGKILL of all"
BEGUN, CHOSEN = "begun", "chosen"
ALL_WEIGHTS = "keras.callbacks.EarlyStopping.restore_best_weights = False"  # which 'weights' has nowhere
BATCH_NORM = "trials.build_model.batch_norm = True"
STEP_SECONDS = 0.05  # of starts that something befalls


@dataclasses.dataclass(frozen=True)
class Life:
    """One start of a run.

    Attributes:
      strategy: one of STRATEGIES.
      end: what befalls it; None: it comes to the run's end.
      trial: of XLA, what of it happens in this start; None: an earlier one's holds.
      workers: of MultiWorker and Horovod.
      sharding: as the setting.
      stored: is put in the place of what was chosen before.
      restarts: that the launcher may make of itself.
    """

    strategy: str
    end: str | None = None
    trial: str | None = None
    workers: int = 2
    sharding: str | None = None
    stored: str | None = None
    restarts: int = 0


CHAINS: dict[str, Sequence[Life]] = {
    "same, fewer, more": [
        Life(MULTI_WORKER, TERM, BEGUN),
        Life(MULTI_WORKER, KILL_CHIEF),
        Life(MULTI_WORKER, KILL_ALL, workers=1),
        Life(MULTI_WORKER),
    ],
    "again by its launcher": [Life(MULTI_WORKER, KILL_OTHER, BEGUN, restarts=2)],
    "one device, two workers, Horovod": [
        Life(ONE_DEVICE, KILL_ALL, CHOSEN),
        Life(MULTI_WORKER, KILL_OTHER, stored="on"),
        Life(HOROVOD, stored="pass"),
    ],
    "Horovod: same, fewer, another engine, sharding": [
        Life(HOROVOD, KILL_ALL, BEGUN, sharding="optimizer"),
        Life(HOROVOD, TERM, sharding="weights"),
        Life(HOROVOD, KILL_CHIEF, workers=1),
        Life(MULTI_WORKER),
    ],
    "Horovod: again by its launcher": [Life(HOROVOD, KILL_OTHER, BEGUN, restarts=2)],
    "sharding": [
        Life(MULTI_WORKER, KILL_OTHER, CHOSEN, sharding="optimizer"),
        Life(MULTI_WORKER, TERM, sharding="weights", stored="pass"),
        Life(MULTI_WORKER, sharding="optimizer"),
    ],
}
FITS: dict[str, Sequence[Life]] = {
    "fewer": [Life(MULTI_WORKER, TERM, BEGUN), Life(MULTI_WORKER, workers=1)],
    "another engine": [Life(HOROVOD, KILL_ALL, CHOSEN), Life(MULTI_WORKER)],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The run on one device without XLA that nobody ends, by what trains it."""
    made = Undisturbed(tmp_path_factory.mktemp("undisturbed"))

    def run(*params: str, module: str = MAIN) -> Run:
        off = "off" if module == FITTED else "train.xla = 'off'"
        found = made(ONE_DEVICE, *params, off, gin_files=[TRIALS], module=module)
        assert found.xla is None
        return found

    return run


def cases(chains: dict[str, Sequence[Life]]) -> list[Any]:
    marks = {True: [pytest.mark.horovod], False: []}
    return [
        pytest.param(lives, id=name, marks=marks[any(life.strategy == HOROVOD for life in lives)])
        for name, lives in chains.items()
    ]


@pytest.mark.parametrize("lives", cases(CHAINS))
def test_a_run_goes_on_however_it_ended(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Run], lives: Sequence[Life]
) -> None:
    run = Run(tmp_path / "run")
    for life in lives:
        live(run, life, f"train.sharding = {life.sharding!r}", ALL_WEIGHTS)
    assert differences(run, undisturbed(ALL_WEIGHTS), tolerance=TOLERANCE) == []


def test_a_choice_that_the_workers_cannot_have_is_made_anew_by_all(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Run]
) -> None:
    """XLA compiles no pass whose batch normalization is synchronized."""
    run = Run(tmp_path / "run")
    run.directory.mkdir()
    live(run, Life(MULTI_WORKER, KILL_OTHER, CHOSEN, stored="on"), BATCH_NORM)
    live(run, Life(MULTI_WORKER), BATCH_NORM)
    assert run.xla in ("off", "update")
    assert differences(run, undisturbed(BATCH_NORM), tolerance=TOLERANCE) == []


@pytest.mark.parametrize("lives", cases(FITS))
def test_fit_goes_on_however_it_ended(
    tmp_path: pathlib.Path, undisturbed: Callable[..., Run], lives: Sequence[Life]
) -> None:
    run = Run(tmp_path / "run")
    for life in lives:
        live(run, life, module=FITTED)
    assert differences(run, undisturbed(module=FITTED), tolerance=TOLERANCE) == []


def live(run: Run, life: Life, *params: str, module: str = MAIN) -> None:
    """Starts the run where it is, until it ends as `life` says."""
    if life.stored is not None:
        (run.directory / "tuned.json").write_text(f'{{"xla": "{life.stored}"}}')
    saved = run.newest_step
    how = {"workers": life.workers, "restarts": life.restarts, "module": module, "gin_files": [TRIALS]}
    pace = None if life.end is None else STEP_SECONDS
    with Process(run, life.strategy, *params, step_seconds=pace, **how) as process:

        def has_come() -> bool:
            is_tried = run.xla not in (None, life.stored) or life.trial is None
            is_over = life.trial != CHOSEN or bool(process.new_events("xla_chosen"))
            return run.newest_step > saved and is_tried and is_over

        if life.end is not None:
            process.until(has_come)
            befall(process, life.end)
            saved = run.newest_step if life.restarts else saved
        status = process.wait(240)
        resumed = [event["step"] for event in process.new_events("resumed")]
        message = f"{resumed} resumed, {saved} saved\n{process.output}"
        if life.end is None or life.restarts:
            assert status == 0, message
            assert run.newest_step == TOTAL_STEPS
        elif life.end == TERM:
            assert status == PREEMPTED, message
            assert run.newest_step == run.progress < TOTAL_STEPS
        else:
            assert status in LOST_PEER, message
            assert run.progress - 1 <= run.newest_step < TOTAL_STEPS
        if life.restarts:
            assert len(resumed) == 1 and resumed[0] >= saved, message
        else:
            assert resumed == ([saved] if saved else []), message
        assert run.xla is not None and (life.trial or not process.new_events("xla_chosen")), message


def befall(process: Process, end: str) -> None:
    if end == TERM:
        process.signal(signal.SIGTERM)
    elif end == KILL_ALL:
        process.kill_all()
    else:
        process.workers()[0 if end == KILL_CHIEF else -1].kill()
