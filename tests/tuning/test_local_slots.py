"""The slots of this machine, without a sweep around them."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest
import support

from tfdist.errors import UserError
from tfdist.launch import local_workers
from tfdist.launch.plan import Plan
from tfdist.launch.supervise.output import Output
from tfdist.tuning.execution.local_slots import TrialCommand

# A script without `if __name__ == "__main__"`, which a process of multiprocessing would start again.
SCRIPT = """\
import contextlib, json, multiprocessing.forkserver, os, pathlib, signal, sys

from tfdist.telemetry.run_directory import RunDirectory
from tfdist.tuning.execution.local_slots import LocalSlots, TrialCommand, start_fork_server

start_fork_server()
server = multiprocessing.forkserver._forkserver._forkserver_pid
blocked = int(pathlib.Path(f"/proc/{server}/status").read_text().partition("SigBlk:")[2].split()[0], 16)
assert blocked >> signal.SIGINT - 1 & 1 or os.getsid(server) == server
with contextlib.suppress(KeyboardInterrupt):
    os.killpg(0, signal.SIGINT)
os.environ["SLURM_STEP_NUM_TASKS"] = "2"
slots = LocalSlots(TrialCommand(["--gin_file=own.gin"]), 2, gpus=["5", "7"])
for name in ("first", "second"):
    slots.start(RunDirectory(f"{sys.argv[1]}/{name}"), ["own.record.name = 'it'"])
ends = []
while len(ends) < 2:
    slots.wait(1.0)
    ends += slots.collect()
slots.close()
assert multiprocessing.forkserver._forkserver._forkserver_pid == server
print(json.dumps({end.name: [end.status, end.log] for end in ends}))
"""
# What a trial imports first: it writes down what it sees, leaves a process behind, and cannot be trained.
OWN = """\
import json, os, signal, subprocess, sys

left = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
told = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_NUM_TASKS")]
print(json.dumps([left.pid, sorted(os.sched_getaffinity(0)), *told]), flush=True)
assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
os._exit(3)
"""


def test_a_trial_has_its_devices_log_and_status_and_leaves_no_process_behind(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.gin").write_text("import own\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "output.log").write_text("of an earlier start\n")
    done = support.run_python([tmp_path / "script.py", tmp_path], cwd=tmp_path).check()
    ended = json.loads(done.stdout)
    assert "Traceback" not in done.stderr
    assert {name: status for name, (status, _) in ended.items()} == {"first": 3, "second": 3}
    cpus = sorted(os.sched_getaffinity(0))
    assert (tmp_path / "first" / "output.log").read_text() == f"of an earlier start\n{ended['first'][1]}"
    for name, gpu in (("first", "5"), ("second", "7")):
        left, own_cpus, *told = json.loads(ended[name][1])
        assert told == [gpu, None] and set(own_cpus) <= set(cpus)
        assert len(own_cpus) == max(1, len(cpus) // 2)
        support.wait_until(lambda left=left: support.is_gone(left), seconds=20)


ENDED = "[launch] worker 1 ended with status"
GONE = "worker 1 was lost: The actor died"


@pytest.mark.parametrize(
    ("status", "log", "cause", "lost"),
    [
        (3, f"[worker 0] on\n[worker 1] error: no\n[worker 0] lost\n{ENDED} 3:\n", "error: no", ""),
        (137, f"[worker 1] on\n[launch] {GONE}\n{ENDED} 137\n", f"on\n{GONE}", GONE),
        (137, f"[launch] {GONE}: out of memory\n{ENDED} 137\n", f"{GONE}: out of memory", ""),
        (1, "Fatal: the cluster is gone\n", "its launcher ended with status 1", "its launcher ended with status 1"),
    ],
)
def test_of_several_workers_the_one_to_blame_tells_why_the_trial_ended(
    status: int, log: str, cause: str, lost: str
) -> None:
    assert TrialCommand([], ["--workers=2"]).find_cause(status, log) == (cause, lost)
    assert TrialCommand([]).find_cause(status, log) == (log, "")


def test_what_the_launcher_cannot_do_for_any_trial_ends_the_sweep() -> None:
    with pytest.raises(UserError, match=r"^Horovod is not installed\.$"):
        TrialCommand([], ["--workers=2"]).find_cause(2, "[worker 0] on\n[launch] Horovod is not installed.\n")


def test_the_workers_of_a_trial_share_its_gpus(tmp_path: pathlib.Path) -> None:
    show = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    environment = support.clean_environment() | {"CUDA_VISIBLE_DEVICES": "3,5,6,7"}
    with (tmp_path / "log").open("wb") as log:
        output = Output(stdout=log.fileno())
        with local_workers.start(Plan(num_workers=2, command=show, environment=environment), output) as workers:
            support.wait_until(lambda: [worker.poll() for worker in workers] == [0, 0], seconds=20)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["[worker 0] 3,5", "[worker 1] 6,7"]
