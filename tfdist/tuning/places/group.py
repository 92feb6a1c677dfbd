"""A trial of several processes: starts them, and ends as they do.

Invariant: the process that leads them has one status, that of the worker whose failure was the cause; a signal to it
reaches all, and none outlives it. It is forked by the fork server. For TF_CONFIG the workers are forked again, with
TensorFlow imported; Horovod's with its rendezvous; those on a Ray cluster by the launcher ray.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tfdist.errors import UserError
from tfdist.launch import local
from tfdist.launch.horovod import horovod
from tfdist.launch.plan import Plan, worker_environment
from tfdist.launch.processes import Worker, has_ended, shell_status
from tfdist.launch.ray import ray
from tfdist.launch.ray.cluster import Resources
from tfdist.launch.supervise.output import STDERR, STDOUT, Output
from tfdist.launch.supervise.watch import watch
from tfdist.strategies.cluster import environment
from tfdist.telemetry.heartbeat import VARIABLE as HEARTBEAT_VARIABLE
from tfdist.telemetry.json_text import from_json, to_json
from tfdist.tuning.places.forks import die_with, forked
from tfdist.tuning.places.machine import GPU_VARIABLE, shares
from tfdist.tuning.places.standby import Start

TF_CONFIG, HOROVOD = "tf_config", "horovod"
_CAUSE = "failed_worker"  # in the record that ends the log
_DRAIN_SECONDS = 5.0
Run = Callable[[Sequence[str]], int]


def launcher_of(strategy: str) -> str:
    """How the processes of a trial find each other, by the text of `train.strategy`.

    Raises:
      UserError: the strategy is of one process.
    """
    name = strategy.removeprefix("@").partition("(")[0]
    if name.endswith((".OneDevice", ".Mirrored", ".Pipelined", ".TPU")):
        raise UserError(
            f"tune.workers_per_trial asks for trials of several processes, and train.strategy is {strategy}, which is "
            "of one. Write @multi_worker.MultiWorker(), @horovod.Horovod() or @auto.choose(), or remove "
            "tune.workers_per_trial."
        )
    return HOROVOD if name.endswith(".Horovod") else TF_CONFIG


def run(become: Run, start: Start) -> int:
    """Runs the command in several processes as one run; its status."""
    signals: collections.deque[int] = collections.deque()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _frame: signals.append(received))
    output = Output()
    try:
        if start.on_ray is not None:
            resources, is_horovod = Resources(**start.on_ray), start.launcher == HOROVOD
            started = ray.start(_plan(start), output, resources=resources, is_horovod=is_horovod)
        elif start.launcher == HOROVOD:
            started = horovod.start(_plan(start), output)
        else:
            started = _started(become, start.arguments, start.processes, output)
        with started as workers:
            outcome = watch(workers, signals=signals, say=output.say)
    except UserError as error:
        output.say(f"error: {error}")
        return error.exit_status
    if outcome.worker is not None:
        print(to_json({_CAUSE: outcome.worker, "status": outcome.status}), flush=True)
    return outcome.status


def cause_of(log: str) -> str:
    """What the process wrote whose end was the cause, by the record that ends the log of several; without one, all."""
    *lines, last = log.splitlines() or [""]
    try:
        prefix = f"[worker {from_json(last)[_CAUSE]}] "
    except (ValueError, KeyError, TypeError):
        return "\n".join(line.removeprefix("[launch] ") for line in [*lines, last])
    return "\n".join(line.removeprefix(prefix) for line in lines if line.startswith(prefix))


def _plan(start: Start) -> Plan:
    command = (sys.executable, "-m", "tfdist.main", *start.arguments)
    return Plan(num_workers=start.processes, command=command, environment=worker_environment(environment.current()))


class _Forked(Worker):
    """A worker that was forked from this process."""

    def __init__(self, index: int, pid: int, heartbeat: Path) -> None:
        self.index, self.heartbeat = index, heartbeat
        self._pid = pid
        self._status: int | None = None

    @property
    def pid(self) -> int:
        return self._pid

    def poll(self) -> int | None:
        if self._status is None and has_ended(self.pid):
            self._status = shell_status(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))
        return self._status

    def send(self, signal_number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal_number)

    def wait(self) -> None:
        if self._status is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.poll()


@contextlib.contextmanager
def _started(become: Run, arguments: Sequence[str], count: int, output: Output) -> Iterator[Sequence[Worker]]:
    with contextlib.ExitStack() as at_end:
        directory = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-trial-")))
        ports = [at_end.enter_context(local.reserve_port()) for _ in range(count)]
        addresses = [f"{local.HOST}:{port.getsockname()[1]}" for port in ports]
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
        workers: list[_Forked] = []
        at_end.callback(output.drain, _DRAIN_SECONDS)
        at_end.callback(_kill, workers)
        gpus = _gpus(count)
        for index, ((_, stdout), (_, stderr)) in enumerate(pipes):
            heartbeat = directory / f"{index}.heartbeat"
            leader, pid = os.getpid(), os.fork()
            if not pid:
                with forked():
                    for port in ports:
                        port.close()
                    variables = {**worker_environment(environment.current()), **gpus[index]}
                    variables |= {"TF_CONFIG": local.tf_config(addresses, index), HEARTBEAT_VARIABLE: str(heartbeat)}
                    environment.change(variables)
                    _become(become, arguments, leader, stdout, stderr, pipes)
                os._exit(1)
            workers.append(_Forked(index, pid, heartbeat))
        for index, ends in enumerate(pipes):
            for (reading, writing), stream in zip(ends, (STDOUT, STDERR), strict=True):
                os.close(writing)
                output.follow(os.fdopen(reading, "rb", buffering=0), stream, index)
        yield workers


def _become(
    become: Run,
    arguments: Sequence[str],
    leader: int,
    stdout: int,
    stderr: int,
    pipes: Sequence[tuple[tuple[int, int], tuple[int, int]]],
) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    die_with(leader)
    os.dup2(stdout, STDOUT)
    os.dup2(stderr, STDERR)
    for ends in pipes:
        for each in (end for pipe in ends for end in pipe):
            os.close(each)
    status = become(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _gpus(count: int) -> list[dict[str, str]]:
    """For each process its part of the GPUs that this one may use."""
    names = [name for name in (environment.current().get(GPU_VARIABLE) or "").split(",") if name]
    if not names:
        return [{}] * count
    return [{GPU_VARIABLE: ",".join(part)} for part in shares(names, count)]


def _kill(workers: Sequence[_Forked]) -> None:
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        worker.wait()
