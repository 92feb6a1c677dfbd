"""Leases: one run at a time on a directory, local or gs://, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from gcs.faults import Fault
from gcs.server import GcsServer
from support import clean_environment

from tfdist.errors import EXIT_IN_USE, UserError
from tfdist.storage import files, lease

HOLD = """
import os, sys, time
from tfdist.storage import lease
held = lease.acquire(sys.argv[1], owner="the first run", wait_seconds=0, notify=print)
if "forks" in sys.argv and os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
held.check()
print("held", flush=True)
sys.stdin.readline()
held.check()
held.release()
print("released", flush=True)
"""


@contextlib.contextmanager
def holder(root: str, *does: str) -> Iterator[subprocess.Popen]:
    """A process that holds the lease until it reads a line; one that "forks" has a child that stays."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, root, *does],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def take(root: str, wait_seconds: float = 0.0) -> tuple[lease.Lease, list[str]]:
    told: list[str] = []
    return lease.acquire(root, owner="the second run", wait_seconds=wait_seconds, notify=told.append), told


def test_a_second_live_run_is_refused_or_waits_for_the_first_and_is_told_who_that_is(root: str) -> None:
    told: list[str] = []
    with holder(root) as first:
        with pytest.raises(UserError, match="the first run") as raised:
            take(root)
        assert f"host {socket.gethostname()}, process {first.pid}, since 20" in str(raised.value)
        assert "give another --run_dir" in str(raised.value)
        assert raised.value.exit_status == EXIT_IN_USE

        def notify(line: str) -> None:
            told.append(line)
            first.stdin.write("\n")
            first.stdin.flush()

        held = lease.acquire(root, owner="next", wait_seconds=30, notify=notify)
        assert first.stdout.readline() == "released\n"
    assert len(told) == 1 and "the first run" in told[0] and "up to 30 s" in told[0]
    held.check()
    held.release()
    held.release()
    with pytest.raises(lease.LeaseLostError):
        held.check()
    assert files.list_names(root) == []


def test_a_lease_that_was_removed_is_lost(root: str) -> None:
    held, told = take(root)
    assert told == []
    files.remove(files.join(root, lease.NAME))
    if files.is_remote(root):
        held._renewed -= 1000  # type: ignore[attr-defined]  # as after a long stop of the process
    with pytest.raises(lease.LeaseLostError, match="not this run's any more"):
        held.check()
    held.release()


def test_a_forked_child_does_not_keep_the_lease_of_a_killed_run(root: str) -> None:
    with holder(root, "forks") as first:
        with pytest.raises(UserError, match="in use by the first run"):
            take(root)
        first.kill()
        first.wait()
        held, _ = take(root, wait_seconds=5.0)
        held.check()
        held.release()


# gs:// alone


def elsewhere(path: str) -> None:
    """Writes the lease of a run of another machine."""
    owner = {"name": "far run", "host": "elsewhere", "pid": 1, "since": "2026", "process": ["a", "b", "c"]}
    files.write_atomic(path, json.dumps(owner))


def test_a_stolen_lease_is_noticed_by_the_renewal(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    held, _ = take("gs://bucket/run")
    elsewhere("gs://bucket/run/.lease")
    held._thread.join(30)  # type: ignore[attr-defined]  # it ends when the lease is lost
    assert not held._thread.is_alive()  # type: ignore[attr-defined]
    with pytest.raises(lease.LeaseLostError):
        held.check()
    held.release()
    assert json.loads(files.read("gs://bucket/run/.lease"))["name"] == "far run"  # the thief's stays


@pytest.mark.slow
def test_a_lease_is_renewed_under_faults(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    held, _ = take("gs://bucket/run")
    first = files.stat("gs://bucket/run/.lease").changed_nanoseconds
    gcs.faults.add(Fault("lost_reply", path="uploadType", count=3), Fault("status", path="uploadType", count=2))
    while len([asked for asked in gcs.asked if asked.fault]) < 5 or gcs.asked[-1].fault:
        held.check()
    held.check()
    assert files.stat("gs://bucket/run/.lease").changed_nanoseconds > first
    held.release()
    assert gcs.buckets.names("bucket") == []


@pytest.mark.slow
def test_a_renewal_that_was_stored_and_never_answered_is_still_ones_own(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, _ = take("gs://bucket/run")
    gcs.faults.add(Fault("lost_reply", method="POST", count=None))
    held._renewed -= 1000  # type: ignore[attr-defined]
    with files.limit_patience(0.1), pytest.raises(OSError):
        held.check()
    gcs.faults.clear()
    held.check()
    held.check()
    held.release()
    assert not files.exists(f"gs://bucket/run/{lease.NAME}")


def test_a_lease_is_released_within_seconds_of_an_outage(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    held, _ = take("gs://bucket/run")
    gcs.faults.add(Fault("status", count=None))
    time.sleep(1.0)  # a renewal is being tried again
    begun = time.monotonic()
    held.release()
    assert time.monotonic() - begun < 6
    gcs.faults.clear()
    assert gcs.buckets.names("bucket") == ["run/.lease"]  # until it lapses


def test_a_machine_that_was_suspended_asks_whether_the_lease_is_still_its_own(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, _ = take("gs://bucket/run")
    files.write_atomic(f"gs://bucket/run/{lease.NAME}", b"another's")
    held.check()  # not asked for: it was renewed a moment ago
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 60 * (clock == time.CLOCK_BOOTTIME))
    with pytest.raises(lease.LeaseLostError):
        held.check()
    held.release()


def test_the_lease_of_another_machine_is_taken_when_it_lapses(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere("gs://bucket/run/.lease")
    with pytest.raises(UserError, match="far run"):
        take("gs://bucket/run", wait_seconds=0.5)
    monkeypatch.setattr(lease, "LAPSE_SECONDS", 0.5)
    held, told = take("gs://bucket/run", wait_seconds=60)
    held.check()
    held.release()
    assert "far run" in told[0]
    assert "took over" in told[-1]


def test_a_process_of_another_start_or_boot_is_told_apart() -> None:
    me = lease.Owner("me", socket.gethostname(), os.getpid(), "now", lease._identify_process(os.getpid()))
    boot, namespace, _ = me.process

    def with_process(*process: str) -> lease.Owner:
        return lease.Owner("other", me.host, me.pid, "then", process)

    assert not me.is_dead()
    assert with_process(boot, namespace, "1").is_dead()  # a number that was given out again
    assert not with_process(boot, "another", "1").is_dead()  # a container, into which we cannot look
    assert not lease.Owner("far", "elsewhere", me.pid, "then", ("", "", "")).is_dead()


@pytest.mark.parametrize(
    "changed",
    [{"pid": "../1"}, {"pid": True}, {"process": ["a"]}, {"process": [1, 2, 3]}, {"host": "\x1b[2J"}, {"name": None}],
)
def test_a_lease_that_nobody_wrote_is_somebody_unknowns(changed: dict[str, object]) -> None:
    sound = {"name": "a", "host": "h", "pid": 1, "since": "now", "process": ["b", "n", "s"]}
    assert lease.Owner.decode(json.dumps(sound).encode()).host == "h"
    for data in (json.dumps(sound | changed).encode(), b"[" * 100_000, b"{}", b"\xff"):
        owner = lease.Owner.decode(data)
        assert (owner.host, owner.is_dead()) == ("unknown", False)
