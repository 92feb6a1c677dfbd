"""Kills a run again and again until it ends, each time at a moment of another kind, and keeps the account.

A moment is chosen by what the run directory shows (an event, a checkpoint that is being written, a step), then a random
delay; so kills land in every phase however fast the machine is. Used by tools/crash_test.py and test_crash.py.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence

import psutil
from crashes.runs import LAUNCHERS, STEPS_PER_EPOCH, TOTAL_STEPS, TRIALS, Process, Run

LIFE_SECONDS = 180.0
PREEMPTED = 143
LOST_PEER = (4, 134, 137)  # what a launcher may end with when one of its workers was killed
LONGEST_STRIDE = 9  # steps from one kill to the next
ENDING_KILLS = 2  # of a run that has done its last step


@dataclasses.dataclass
class Account:
    """What became of the runs of one strategy."""

    strategy: str
    kills: int = 0
    restarts: int = 0
    runs: int = 0
    unrecoverable: int = 0
    most_steps_lost: int = 0
    identical_runs: int = 0
    seconds: float = 0.0
    moments: Counter[str] = dataclasses.field(default_factory=Counter)
    victims: Counter[str] = dataclasses.field(default_factory=Counter)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.problems and not self.unrecoverable and self.identical_runs == self.runs


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: once `has_come`, after a random part of `delay_seconds`."""

    name: str
    has_come: Callable[[Process], bool]
    delay_seconds: float


def random_moment(run: Run, dice: random.Random) -> Moment:
    """A moment that this run has still before it."""
    at = run.newest_step
    goal = min(at + dice.randint(1, LONGEST_STRIDE), TOTAL_STEPS)
    epoch_end = min((at // STEPS_PER_EPOCH + 1) * STEPS_PER_EPOCH, TOTAL_STEPS)
    if at >= TOTAL_STEPS:
        choices = [ENDING, ENDING, RESTORING]
    else:
        choices = [
            STARTING,
            RESTORING,
            Moment("saving", lambda p: p.run.newest_step >= goal - 1 and p.run.is_writing, 0.004),
            Moment("pruning", lambda p: p.run.newest_step >= goal, 0.004),
            Moment("training", lambda p: p.run.newest_step >= goal, 0.1),
            Moment("evaluating", lambda p: p.run.newest_step >= epoch_end - 1, 0.3),
            Moment("saving", lambda p: p.run.newest_step >= goal - 1 and p.run.is_writing, 0.0),
        ]
        if epoch_end == TOTAL_STEPS:
            choices += [ENDING] * 3
    return dice.choice(choices)


TRYING = Moment("trying XLA", lambda p: p.run.xla is not None and p.run.newest_step > 0, 4.0)
STARTING = Moment("starting", lambda p: True, 6.0)
RESTORING = Moment("restoring", lambda p: bool(p.new_events("training_started")), 4.0)
ENDING = Moment("ending", lambda p: p.run.newest_step >= TOTAL_STEPS, 0.8)


def disturb(
    run: Run,
    account: Account,
    dice: random.Random,
    *,
    most_kills: int,
    number: int = signal.SIGKILL,
    step_seconds: float | None = 0.02,
    most_lost: int = 1,
    engines: Sequence[tuple[str, int]] = (),
) -> None:
    """One run from its beginning to its end, killed `most_kills` times on the way, or fewer if it ends before.

    Args:
      run: its directory, which does not exist yet.
      account: is added to.
      dice: decides.
      most_kills: after which it is left alone.
      number: SIGKILL, or one of the signals after which a run saves first.
      step_seconds: as `Process` has it.
      most_lost: the steps that a kill may cost.
      engines: strategies and numbers of workers for the dice to choose from at each start, with XLA tried; none: always
        the account's strategy, without.
    """
    ending_kills, begun = 0, account.kills
    account.runs += 1
    while not run.is_finished:
        spared = account.kills - begun >= most_kills or ending_kills >= ENDING_KILLS
        before = run.newest_step
        ending_kills += before >= TOTAL_STEPS
        is_last = account.kills - begun == most_kills - 1  # goes to the end, which the others may not live to see
        if spared:
            moment = None
        elif engines and run.xla is None:
            moment = TRYING
        else:
            moment = ENDING if is_last else random_moment(run, dice)
        strategy, workers = dice.choice(engines) if engines else (account.strategy, 2)
        how = {"workers": workers, "gin_files": [TRIALS] if engines else []}
        with Process(run, strategy, step_seconds=step_seconds, **how) as process:
            try:
                was_killed = moment is not None and _kill(process, moment, account, dice, number)
                status = process.wait(LIFE_SECONDS)
            except (TimeoutError, psutil.Error) as error:
                return _give_up(account, process, f"{type(error).__name__}: {error}")
            problem = _wrong_status(account, status, was_killed=was_killed, number=number)
            if problem or not _goes_on_right(process, account, before):
                return _give_up(account, process, problem or "it did not resume from its newest checkpoint")
        account.restarts += before > 0
        if was_killed:
            lost = max(0, run.progress - run.newest_step)
            account.most_steps_lost = max(account.most_steps_lost, lost)
            if lost > (most_lost if number == signal.SIGKILL else 0):
                account.problems.append(f"{run.directory}: {lost} steps lost, while {moment.name}")


def _kill(process: Process, moment: Moment, account: Account, dice: random.Random, number: int) -> bool:
    """Whether it was signalled before it ended."""
    give_up = time.monotonic() + LIFE_SECONDS
    while process.status is None and not moment.has_come(process):
        if time.monotonic() > give_up:
            raise TimeoutError(f"{moment.name} did not come")
        time.sleep(0.001)
    time.sleep(dice.uniform(0.0, moment.delay_seconds))
    if process.status is not None:
        return False
    victim = _strike(process, dice, number)
    account.kills += 1
    account.moments[moment.name] += 1
    account.victims[victim] += 1
    return True


def _strike(process: Process, dice: random.Random, number: int) -> str:
    """Signals one worker, the launcher, or all; says which."""
    if process.strategy not in LAUNCHERS:
        process.signal(number)
        return "the process"
    workers = process.workers()
    victim = dice.choice(["one worker", "one worker", "all", "the launcher"])
    if victim == "one worker" and workers:
        dice.choice(workers).send_signal(number)
    elif victim == "all" and number == signal.SIGKILL:
        process.kill_all()
    else:
        victim = "the launcher"
        process.signal(number)
    return victim


def _wrong_status(account: Account, status: int, *, was_killed: bool, number: int) -> str | None:
    allowed = {0}
    if was_killed:
        allowed |= {PREEMPTED} if number != signal.SIGKILL else {*LOST_PEER}
        if number == signal.SIGUSR1:
            allowed.add(128 + number)  # it came before anybody listened
    return None if status in allowed else f"ended with status {status}"


def _goes_on_right(process: Process, account: Account, before: int) -> bool:
    """Whether this life, if it came so far, began where the last one's newest checkpoint was."""
    resumed = [event["step"] for event in process.new_events("resumed")]
    trained = process.new_events("checkpoint_saved")
    return process.run.newest_step >= before and (resumed == [before] if resumed or (trained and before) else True)


def _give_up(account: Account, process: Process, what: str) -> None:
    account.unrecoverable += 1
    account.problems.append(f"{process.run.directory}: {what}\n{process.output[-3000:]}")
