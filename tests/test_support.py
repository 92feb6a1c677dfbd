"""tests/support.py: a process started for a test cannot outlive it, hang it or inherit a cluster."""

from __future__ import annotations

import time

import psutil
import pytest
import support

# Prints the process id of a grandchild in a session of its own, then waits, as that one does.
PARENT_OF_A_STRAY = """
import subprocess, sys, time
stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(stray.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_both_outputs_and_the_status_are_returned() -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    assert support.run_python(["-c", program]) == support.Finished(3, "out\n", "err\n")


@pytest.mark.slow
def test_a_process_over_time_is_killed_with_all_it_started_and_shown() -> None:
    with pytest.raises(pytest.fail.Exception, match="not done after 4 s, killed") as failure:
        support.run_python(["-c", PARENT_OF_A_STRAY, "600"], timeout=1)
    stray = int(str(failure.value).split("--- stdout\n")[1].split()[0])
    assert gone(stray)


def test_what_a_process_leaves_behind_is_killed() -> None:
    finished = support.run_python(["-c", PARENT_OF_A_STRAY, "0"]).check()
    assert gone(int(finished.stdout))


def gone(pid: int) -> bool:
    """Whether it ended (an orphan whose new parent does not reap stays a zombie), within a second."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_no_cluster_leaks_into_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("no_proxy", "example.org")
    program = "import os; print(*[os.environ.get(n) for n in ('TF_CONFIG', 'HOROVOD_RANK', 'HOME', 'no_proxy', 'X')])"
    finished = support.run_python(["-c", program], env={"X": "y", "HOME": None})
    assert finished.stdout.split() == ["None", "None", "None", "example.org,127.0.0.1,localhost", "y"]
