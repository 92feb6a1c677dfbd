"""When workers are started again, how soon, without whom; and what the supervisor makes of what it sees."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import pytest
from gcs.server import GcsServer

from tfdist.errors import EXIT_STORE_UNAVAILABLE
from tfdist.launch.supervise import stacks
from tfdist.launch.supervise.hangs import (
    STOPPED_SECONDS,
    Deadlines,
    Vital,
    Watcher,
    find_hindmost,
    find_missing,
    find_stalled,
)
from tfdist.launch.supervise.restarts import GiveUp, Restart, Restarts
from tfdist.launch.supervise.supervisor import LaunchJournal
from tfdist.storage import files
from tfdist.telemetry import heartbeat
from tfdist.telemetry.heartbeat import Heartbeat, Reading, read, read_exit_info, stacks_path

KILLED = 137


def account(workers: int = 2, **rules: int) -> Restarts:
    return Restarts(workers, **{"max_restarts": 100, **rules})


def test_waiting_doubles_up_to_a_minute_and_there_is_none_behind_a_new_step() -> None:
    restarts = account()
    waits = [restarts.decide(KILLED, 1, step).seconds for step in (3, 3, 3)]
    assert waits == [0.0, 2.0, 4.0]
    assert restarts.decide(KILLED, 1, 4).seconds == 0.0
    assert restarts.decide(EXIT_STORE_UNAVAILABLE, 1, 5).seconds == 2.0  # the store may not answer yet
    far = Restarts(2, max_restarts=100, backoff_seconds=40.0)
    far.decide(KILLED, 0, None)
    assert far.decide(KILLED, 0, None).seconds == 60.0


def test_the_breaker_lets_one_start_through_after_two_minutes() -> None:
    restarts = account()
    assert [restarts.decide(KILLED, 1, None).seconds for _ in range(3)] == [2.0, 4.0, 120.0]
    assert restarts.decide(KILLED, 1, None).event == "breaker_opened"
    assert restarts.decide(KILLED, 1, 7).seconds == 0.0  # a new step closes it


def test_without_the_flag_an_error_before_the_first_step_is_final_and_a_kill_is_not() -> None:
    restarts = Restarts(2, 3, is_asked=False)
    assert restarts.decide(1, 0, None) == GiveUp()
    assert isinstance(restarts.decide(KILLED, 0, None), Restart)
    assert isinstance(restarts.decide(1, 0, 5), Restart)


def test_an_outage_of_a_store_is_waited_for_and_no_worker_is_left_out_for_it_and_restarts_are_counted() -> None:
    restarts = account(3, min_workers=2)
    outage = (EXIT_STORE_UNAVAILABLE, 2, None)
    decisions = [restarts.decide(*outage) for _ in range(7)]
    assert [decision.seconds for decision in decisions] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert {decision.left_out for decision in decisions} == {frozenset()}
    counted = account(max_restarts=2)
    decisions = [counted.decide(KILLED, 0, step) for step in (1, 2, 3)]
    assert [type(decision) for decision in decisions] == [Restart, Restart, GiveUp]
    assert decisions[-1].event == "restarts_used_up"
    assert account(max_restarts=0).decide(KILLED, 0, 1) == GiveUp()


@pytest.mark.parametrize("status", [2, 3, 143, 130])
def test_what_another_start_cannot_mend_is_final(status: int) -> None:
    assert account().decide(status, 0, 10) == GiveUp()
    assert isinstance(account().decide(status, 0, 10, is_retryable=True), Restart)


def test_who_fails_again_and_again_is_left_out_and_taken_in_behind_a_new_step() -> None:
    restarts = account(3, min_workers=2)
    lost = (KILLED, 2, None)
    assert restarts.decide(KILLED, 2, 10).left_out == frozenset()
    assert restarts.decide(*lost).left_out == frozenset()
    assert restarts.decide(*lost).left_out == {2}
    assert restarts.decide(KILLED, 0, 20).left_out == frozenset()  # it continued with two, and takes in the third
    assert restarts.decide(*lost).left_out == {2}  # which has one chance
    assert isinstance(restarts.decide(KILLED, 0, None), Restart)
    all_of_them = account(3, min_workers=3)
    assert [all_of_them.decide(*lost).left_out for _ in range(2)] == [frozenset()] * 2


def reading(phase: str = heartbeat.TRAINING, *, moment: float = 100.0, **changes: float) -> Reading:
    made = Reading(
        pid=1,
        host="here",
        phase=phase,
        turn=9,
        step=10,
        moment=moment,
        recent_seconds=0.1,
        longest_seconds=0.1,
        shows_stacks=True,
    )
    return dataclasses.replace(made, **changes)


def vital(worker: int, shown: Reading | None, state: str = "S") -> Vital:
    return Vital(worker, 100 + worker, state, shown)


def test_a_deadline_is_learned_from_what_was_done_before() -> None:
    learned = Deadlines(start_seconds=1000.0)
    assert learned.of(None) == 1000.0
    assert learned.of(reading(recent_seconds=0.0)) == 1000.0  # the first one compiles
    assert learned.of(reading()) == 60.0
    assert learned.of(reading(recent_seconds=20.0, longest_seconds=20.0)) == 200.0
    assert learned.of(reading(recent_seconds=1.0, longest_seconds=90.0)) == 180.0
    assert learned.of(reading(heartbeat.BETWEEN)) == 1000.0  # a user's callbacks take what they take
    assert learned.of(reading(heartbeat.PREPARING, recent_seconds=0.0)) == math.inf
    given = Deadlines(start_seconds=1000.0, given_seconds=7.0)
    assert given.of(reading()) == given.of(reading(heartbeat.BETWEEN)) == 7.0
    assert given.of(reading(recent_seconds=0.0)) == given.of(reading(heartbeat.BUILDING)) == 1000.0


def look_until(watcher: Watcher, vitals: list[Vital], begin: float, end: float) -> Any:
    """What is found in looks a second apart; the last of them."""
    found = None
    now = begin
    while now <= end:
        found = watcher.find(vitals, now)
        now += 1.0
    return found


def test_who_the_others_wait_for_hangs_and_only_its_own_deadline_counts() -> None:
    waits, blocked = vital(0, reading(turn=12)), vital(1, reading(heartbeat.BETWEEN, turn=11, recent_seconds=0.0))
    watcher = Watcher(Deadlines(start_seconds=300.0))
    assert look_until(watcher, [waits, blocked], 100.0, 399.0) is None  # the other is past its 60 seconds
    found = look_until(watcher, [waits, blocked], 400.0, 402.0)
    assert [suspect.worker for suspect in found.suspects] == [1]
    both = look_until(Watcher(Deadlines()), [vital(0, reading()), vital(1, reading())], 100.0, 162.0)
    assert [suspect.worker for suspect in both.suspects] == [0, 1]


def test_a_stopped_worker_is_known_by_that() -> None:
    watcher, vitals = Watcher(Deadlines()), [vital(0, reading()), vital(1, reading(), "T")]
    assert look_until(watcher, vitals, 100.0, 99.0 + STOPPED_SECONDS) is None
    assert [suspect.worker for suspect in watcher.find(vitals, 100.0 + STOPPED_SECONDS).suspects] == [1]
    # A deadline may come first.
    soon = look_until(Watcher(Deadlines(given_seconds=1.0)), vitals, 100.0, 102.0)
    assert [suspect.worker for suspect in soon.suspects] == [1] and soon.why == "it is stopped, as by SIGSTOP"


def test_time_in_which_the_supervisor_was_stopped_itself_does_not_count() -> None:
    watcher, vitals = Watcher(Deadlines()), [vital(0, reading()), vital(1, reading())]
    look_until(watcher, vitals, 100.0, 110.0)
    assert look_until(watcher, vitals, 1000.0, 1059.0) is None
    assert look_until(watcher, vitals, 1060.0, 1062.0) is not None


def test_the_hindmost_has_begun_fewer_turns_and_the_missing_has_not_met_the_others() -> None:
    def last(*shown: Reading | None) -> list[int]:
        return [vital.worker for vital in find_hindmost([vital(i, r) for i, r in enumerate(shown)])]

    assert last(reading(), None) == [1]
    assert last(reading(heartbeat.CONNECTING, turn=2), reading(heartbeat.STARTING, turn=1)) == [1]
    assert last(reading(turn=12), reading(heartbeat.BETWEEN, turn=11), reading(heartbeat.SAVING, turn=13)) == [1]
    assert last(reading(turn=12), reading(turn=12)) == [0, 1]
    assert last(reading(turn=12), reading(heartbeat.LEAVING, turn=13)) == [1]
    waits = vital(0, reading(heartbeat.CONNECTING))
    assert find_missing([waits, vital(1, reading(heartbeat.STARTING))]).suspects[0].worker == 1
    assert find_missing([waits, vital(1, reading(), "T")]).suspects[0].worker == 1
    assert find_missing([waits]) is None


def test_a_heartbeat_shows_what_a_process_does_and_what_it_told(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "0.heartbeat"
    assert read(path) is None and read_exit_info(path) == {}
    mine = Heartbeat(str(path))
    assert (read(path).phase, read(path).step, read(path).recent_seconds) == (heartbeat.STARTING, None, 0.0)
    before = time.monotonic()
    mine.beat(heartbeat.TRAINING, 7)
    mine.beat(heartbeat.BETWEEN)
    mine.beat(heartbeat.TRAINING, 8)
    mine.set_writing_checkpoint(True, writer=1)
    mine.set_writing_checkpoint(False, writer=2)
    shown = read(path)
    assert (shown.phase, shown.step, shown.turn, shown.is_storing) == (heartbeat.TRAINING, 8, 4, True)
    assert before <= shown.moment <= time.monotonic() and 0 < shown.recent_seconds <= shown.longest_seconds < 60
    mine.add_exit_info(run_dir="a")
    mine.add_exit_info(address_taken=True)
    assert read_exit_info(path) == {"run_dir": "a", "address_taken": True}
    assert stacks_path(path).exists()


def test_who_stood_still_is_told_from_who_trained_and_who_waited_for_another() -> None:
    def still(*vitals: Vital, now: float) -> list[int]:
        return [vital.worker for vital in find_stalled(vitals, now)]

    trains = [vital(index, reading(moment=100.0)) for index in range(3)]
    assert still(*trains, now=101.0) == []
    assert still(*trains, vital(3, reading(), "T"), now=101.0) == [3]
    blocked, dead = vital(3, reading(heartbeat.BETWEEN, turn=8)), vital(3, None)
    assert still(*trains, blocked, now=104.0) == [] and still(*trains, blocked, now=106.0) == [3]
    assert still(*trains, dead, now=200.0) == []  # who is gone is what they waited for
    assert still(*trains, now=200.0) == [0, 1, 2]
    slow = [vital(index, reading(moment=100.0, recent_seconds=60.0)) for index in range(2)]
    assert still(*slow, now=500.0) == []
    compiling = [vital(index, reading(moment=100.0, recent_seconds=0.0)) for index in range(2)]
    assert still(*compiling, now=500.0) == []


def test_a_worker_has_one_line_and_one_that_stood_still_its_stacks_once() -> None:
    library = '  File "/env/site-packages/tensorflow/python/eager/execute.py", line 53 in quick_execute\n'
    script = '  File "/env/site-packages/tensorflow/python/ops/script_ops.py", line 1 in call\n'
    first = f"Thread 0x7f01 (most recent call first):\n{script}"
    second = f'Current thread 0x7f02 (most recent call first):\n{library * 3}  File "/a/loop.py", line 2 in run\n'
    dump = f"{first}\n{second}"
    vitals = [vital(index, reading(moment=90.0)) for index in range(3)] + [vital(3, reading(), "T"), vital(4, None)]
    shown = stacks.format_stacks(vitals, dict.fromkeys(range(3), dump), stalled={0, 2, 3}, now=100.0)
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == "worker 0 (host here, process 100): training for 10 s, last step 10"
    assert lines[1:5] == ["main thread:", library.strip(), 'File "/a/loop.py", line 2 in run', "Thread:"]
    assert lines[-6:] == [
        "worker 2 (host here, process 102): training for 10 s, last step 10",
        "its stacks are those of worker 0",
        "worker 3 (host here, process 103): training for 0 s, last step 10",
        "its stacks cannot be shown: it is stopped",
        "worker 1: training, last step 10",
        "worker 4: it has not shown itself",
    ]
    assert stacks.is_input_blocked(dump) and not stacks.is_input_blocked(dump.split("\n\n")[1])
    many = stacks.format_stacks([vital(i, reading()) for i in range(1000)], {}, stalled={999}, now=100.0).splitlines()
    assert many[0].startswith("worker 999 (host here") and many[-1] == "983 more workers" and len(many) == 19


def test_stacks_are_whole_behind_earlier_ones_with_characters_of_several_bytes(tmp_path: pathlib.Path) -> None:
    class Answering:
        index, heartbeat = 0, tmp_path / "0"

        def send(self, signal_number: int) -> None:
            with stacks_path(self.heartbeat).open("a", encoding="utf-8") as file:
                file.write("Thread 0x2: b.py\n")

    stacks_path(Answering.heartbeat).write_text("Thread 0x1: Übungen/größte.py\n", encoding="utf-8")
    assert stacks.collect_stacks([Answering()], [vital(0, reading())]) == {0: "Thread 0x2: b.py\n"}


@pytest.mark.slow
def test_what_the_supervisor_does_goes_behind_the_events_of_a_run_in_a_bucket(gcs: GcsServer) -> None:
    said: list[str] = []
    place = "gs://bucket/run"
    journal = LaunchJournal(said.append, run_dir=place)
    journal.log("warning", "worker_failed", worker=1, step=7, status=KILLED)
    assert not files.exists(f"{place}/events.jsonl")  # the run has not made its directory
    files.write_atomic(f"{place}/events.jsonl", '{"event": "training_started"}\n')
    journal.log("info", "restarted", restart=1)
    events = [json.loads(line) for line in files.read(f"{place}/events.jsonl").decode().splitlines()]
    assert [event["event"] for event in events] == ["training_started", "worker_failed", "restarted"]
    assert events[1]["worker"] == 1 and events[1]["step"] == 7 and events[1]["details"] == {"status": KILLED}
    assert said == []
