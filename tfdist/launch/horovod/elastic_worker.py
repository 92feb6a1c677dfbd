"""One worker of an elastic Horovod run.

`python -m tfdist.launch.horovod.elastic_worker [options] -- ARGUMENTS of tfdist.main`.

Horovod's own way is to set itself up again inside of a training that has lost a worker; but TensorFlow's step function
and tfdist's strategies are set up once a process. So horovodrun starts this program in each slot. It imports no
TensorFlow and stays for as long as the slot does; the training runs in a child of it, another one each round (see
`elastic_driver.py`), and resumes from the newest checkpoint with as many workers as there are. `tfdist.main` becomes
such a worker by itself where an elastic horovodrun has started it.

Invariant: this process ends with 0 when the run is done or has no place for this slot any more; else with the status of
a child that it could not or must not start again: what the user has to mend (2) and a training that diverged (3), on
all workers; one that was told to leave; and one that failed by itself too often.
"""

from __future__ import annotations

import collections
import itertools
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist import command_line
from tfdist.command_line import flags, split_at_dashes
from tfdist.errors import EXIT_DONE, PeerLostError, PreemptedError, TfdistError, UserError
from tfdist.launch.horovod.elastic_account import Account
from tfdist.launch.horovod.elastic_driver import EXAMPLE, Driver, Place
from tfdist.launch.horovod.elastic_round import DONE, FAILED, OVER, POLL_SECONDS, STOP, Ending, Patience, run_round
from tfdist.launch.plan import worker_environment
from tfdist.launch.supervise.journal import Journal
from tfdist.launch.supervise.watch import OWN_DOING, SYMPTOMS, describe
from tfdist.strategies.cluster.environment import ELASTIC_CHILD_VARIABLE

DESCRIPTION = f"""\
python -m tfdist.launch.horovod.elastic_worker [FLAGS] -- ARGUMENTS OF tfdist.main

Runs `python -m tfdist.main ARGUMENTS` in a slot of an elastic horovodrun, again and again, until the run is done.

  {EXAMPLE}

When a worker is lost or the hosts change, the others start their process again and resume from the newest checkpoint.
"""
FLAGS = flags.FlagValues()
command_line.define_seconds(
    "peer_timeout_seconds",
    900.0,
    "how long to wait for the other workers and for hosts; more than horovodrun's --elastic-timeout",
    FLAGS,
)
command_line.define_seconds(
    "end_seconds",
    Patience().notice_seconds,
    "how long a process that trains may take to end by itself once another worker's has ended",
    FLAGS,
)
flags.DEFINE_integer(
    "max_failures",
    3,
    "start again after so many failures of this worker itself within an hour",
    lower_bound=0,
    flag_values=FLAGS,
)
flags.DEFINE_string("module", "tfdist.main", "what to run", flag_values=FLAGS)
_SETTLE_SECONDS = 2.0  # for word that another worker's end was the cause, after this one lost its peers


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        options, command = parse(sys.argv[1:] if arguments is None else arguments)
        driver = Driver(os.environ)
        with tempfile.TemporaryDirectory(prefix="tfdist-elastic-") as heartbeats:
            return ElasticWorker(
                driver,
                command,
                worker_environment(os.environ) | {ELASTIC_CHILD_VARIABLE: "1"},
                peer_timeout_seconds=options.peer_timeout_seconds,
                max_failures=options.max_failures,
                patience=Patience(notice_seconds=options.end_seconds),
                heartbeats=Path(heartbeats),
            ).run()
    except TfdistError as error:
        say(f"error: {error}")
        return error.exit_status


class ElasticWorker:
    """A slot, round after round.

    Args:
      driver: that started this process.
      command: of the child.
      environment: of the child, but for its place.
      peer_timeout_seconds: for all others to end a round, and for the driver to find enough hosts.
      max_failures: of this worker itself within an hour after which it starts its child again.
      patience: with a child of a round that is over for another worker.
      heartbeats: a directory in which each child shows itself.
    """

    def __init__(
        self,
        driver: Driver,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        peer_timeout_seconds: float,
        max_failures: int,
        patience: Patience,
        heartbeats: Path,
    ) -> None:
        self._driver = driver
        self._command = command
        self._environment = environment
        self._peer_timeout_seconds = peer_timeout_seconds
        self._account = Account(max_failures)
        self._journal = Journal(say)
        self._patience = patience
        self._heartbeats = heartbeats
        self._signals: collections.deque[int] = collections.deque()
        self._hosts_changed = threading.Event()

    def run(self) -> int:
        """Runs the training for as long as this slot is part of it; returns the exit status.

        Raises:
          UserError: Horovod is not installed.
          PeerLostError: the driver or the other workers did not answer in time.
          PreemptedError: this process was told to end while it waited for them.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda received, _frame: self._signals.append(received))
        self._driver.call_when_hosts_change(self._hosts_changed.set)
        place: Place | None = self._driver.first_place
        rounds = itertools.count()
        while place is not None:
            ending = run_round(
                place,
                driver=self._driver,
                command=self._command,
                environment=self._environment,
                signals=self._signals,
                hosts_changed=self._hosts_changed,
                say=say,
                patience=self._patience,
                heartbeat_path=self._heartbeats / f"{next(rounds)}.heartbeat",
            )
            if ending.status == EXIT_DONE:
                self._driver.tell(DONE)
                return EXIT_DONE
            status = self._final_status(place, ending)
            self._driver.tell(OVER, noted_no_signal=ending.noted_no_signal)
            self._journal.store(ending.facts.get("run_dir"))
            if status is not None:
                return status
            place = self._next_place(place, ending)
        say(f"{self._driver.host} has no worker any more; the run continues elsewhere.")
        return EXIT_DONE

    def _final_status(self, place: Place, ending: Ending) -> int | None:
        """The status to end with after a child did not end well; None: there is another round."""
        if ending.was_told:
            return ending.status
        if ending.status in OWN_DOING:
            self._driver.tell(STOP, status=ending.status, worker=place.rank, host=self._driver.host)
            say(f"{place} ended with {describe(ending.status)}, which would be so again: all end.")
            return ending.status
        stop = self._word_to_stop(ending)
        if self._driver.told(DONE) is not None:
            say(f"{place} ended with {describe(ending.status)}, when the run was done already.")
            return EXIT_DONE
        if stop is not None:
            whose = f"worker {stop['worker']} (host {stop['host']})"
            say(f"{place}: {whose} ended with {describe(stop['status'])}: all end.")
            return int(stop["status"])
        self._tell_failure(place, ending)
        if (why := self._account.enough(place, ending, time.monotonic())) is not None:
            say(f"{place} ended with {describe(ending.status)} and is not started again: {why}.")
            return ending.status
        return None

    def _word_to_stop(self, ending: Ending) -> dict[str, Any] | None:
        """What another worker has left because it ended by its own doing."""
        settled_at = time.monotonic() + (_SETTLE_SECONDS if ending.status in SYMPTOMS else 0.0)
        while (stop := self._driver.told(STOP, "status", "worker", "host")) is None and time.monotonic() < settled_at:
            time.sleep(POLL_SECONDS)
        return stop

    def _tell_failure(self, place: Place, ending: Ending) -> None:
        """Leaves word of a failure of this worker itself; the chief's notes what it knows, while no process trains."""
        how = "hung, and was killed" if ending.hung else f"ended with {describe(ending.status)}"
        is_to_blame = ending.is_own_failure or ending.hung
        failed = {"worker": place.rank, "host": self._driver.host, "status": ending.status, "how": how}
        if is_to_blame:
            self._driver.tell(FAILED, **failed)
        if place.rank > 0:
            return
        if not ending.is_failure:
            if ending.was_asked:
                self._journal.note("info", "hosts_changed", step=ending.step, num_workers=place.size)
            return
        found = failed if is_to_blame else self._driver.told(FAILED, "status", "worker", "host", "how")
        found = found or {
            "worker": None,
            "host": None,
            "status": None,
            "how": "is gone or hangs, and its host may, too",
        }
        worker: Any = found["worker"]
        message = f"{'a worker' if worker is None else f'worker {worker}'} {found['how']}"
        self._journal.note(
            "warning",
            "worker_failed",
            worker=worker,
            step=ending.step,
            message=message,
            status=found["status"],
            host=found["host"],
            num_workers=place.size,
        )

    def _next_place(self, place: Place, ending: Ending) -> Place | None:
        """This slot's place in the next round; None where it has none."""
        said = "waiting for the others, to resume from the newest checkpoint."
        say(f"{place} ended with {describe(ending.status)}; {said}")
        self._hosts_changed.clear()  # before the driver deals the places: what it finds later is for the next round
        replies: queue.SimpleQueue[Place | PeerLostError | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                replies.put(self._driver.next_place(self._peer_timeout_seconds))
            except PeerLostError as error:
                replies.put(error)

        threading.Thread(target=ask, name="tfdist-next-place", daemon=True).start()
        while True:
            if self._signals:
                raise PreemptedError(f"{signal.Signals(self._signals[0]).name} was received between two rounds.")
            try:
                reply = replies.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(reply, PeerLostError):
                raise reply
            if reply is not None:
                say(f"{place} is {reply} now.")
            return reply


def parse(arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """The flags, and the command of the child.

    Raises:
      UserError: they cannot be understood.
    """
    ours, workers_own = split_at_dashes(arguments)
    hint = f"The arguments of tfdist.main come after `--`: {EXAMPLE}"
    options = command_line.parse(FLAGS, ours, about=DESCRIPTION, hint=hint)
    if not workers_own:
        raise UserError(
            f"The `--` and tfdist.main's arguments are missing. Received: {' '.join(arguments)!r}. Write: {EXAMPLE}"
        )
    return options, [sys.executable, "-m", options.module, *workers_own]


def say(message: str) -> None:
    """One line on stderr, which horovodrun passes on."""
    print(f"[elastic] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    command_line.start(main)
