"""The hosts that a command lists, and workers on them, started through a remote shell.

Invariant: nothing is left of the workers when `start` ends, or when this process does: each has a `worker_host` on
its host that ends with the connection. Variables travel on that connection, not on a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.errors import UserError
from tfdist.launch import local_workers
from tfdist.launch.horovod_workers import serve_rendezvous
from tfdist.launch.own_host import LOOPBACK, refuse_loopback
from tfdist.launch.plan import Plan, host_of
from tfdist.launch.processes import Worker, send_to_group
from tfdist.launch.supervise.output import Output
from tfdist.launch.worker_host import HostLostError, start_hosted

ASK_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # for the command
# Environment variables of one host; a worker elsewhere has its own.
HOST_VARIABLES = ("HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TMPDIR", "USER", "_")
_END_SECONDS = 10.0
_POLL_SECONDS = 0.1
_STATUS_SECONDS = 1.0  # from the end of a process's output to its own


def read_hosts(text: str) -> list[str]:
    """The slots that a listing names: `HOST` or `HOST:SLOTS` a line; a host's second slot is `HOST#2`.

    Raises:
      UserError: a line is neither, or localhost stands beside other machines.
    """
    slots: list[str] = []
    for line in text.splitlines():
        if not (entry := line.partition("#")[0].strip()):
            continue
        host, _, count = entry.partition(":")
        if not (count or "1").isdecimal() or len(host.replace(",", " ").split()) != 1:
            raise UserError(f"--hosts_command lists HOST or HOST:SLOTS, one a line; received {line!r}.")
        known = sum(host_of(slot) == host for slot in slots)
        slots += [host if not number else f"{host}#{number + 1}" for number in range(known, known + int(count or 1))]
    refuse_loopback([host_of(slot) for slot in slots], "--hosts_command")
    return slots


class HostList:
    """The hosts that a command lists, which a thread runs again each second; `slots` is the newest listing.

    Args:
      command: for the shell; the launcher's signals do not reach it.
      report: is called when it fails; the last listing then stays.
      signals: once it has one, the first listing is given up, and empty.

    Raises:
      UserError: it fails the first time.
    """

    def __init__(self, command: str, report: Callable[[str], None], signals: Sequence[int]) -> None:
        self._command = command
        self._report = report
        self._closing = threading.Event()
        self.slots = self._run_command(lambda: bool(signals))
        self._thread = threading.Thread(target=self._follow, name="tfdist-hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the listing, and the command where it runs."""
        self._closing.set()
        self._thread.join(_END_SECONDS)

    def _follow(self) -> None:
        failure = ""
        while not self._closing.wait(ASK_SECONDS):
            try:
                self.slots, failure = self._run_command(self._closing.is_set), ""
            except UserError as error:
                if str(error) != failure:
                    self._report(f"{error} The hosts stay as they are.")
                failure = str(error)

    def _run_command(self, is_over: Callable[[], bool]) -> list[str]:
        """Lists the hosts; none where it `is_over` before the command ends."""
        name, begin = f"--hosts_command={self._command!r}", time.monotonic()
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            popen = subprocess.Popen(self._command, shell=True, errors="replace", start_new_session=True, **how)
        except OSError as error:
            raise UserError(f"{name} could not be started: {error}.") from error
        with popen:
            while popen.returncode is None:
                try:
                    listing, errors = popen.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    is_late = time.monotonic() - begin > ANSWER_SECONDS
                    if is_late or is_over():
                        send_to_group(popen.pid, signal.SIGKILL)
                        if not is_late:
                            return []
                        raise UserError(f"{name} did not end within {ANSWER_SECONDS:g} s.") from None
        if popen.returncode:
            words = errors.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"{name} ended with status {popen.returncode}: {words[0]}.")
        return read_hosts(listing)


@contextlib.contextmanager
def start(plan: Plan, output: Output, *, remote_shell: str, is_horovod: bool = False) -> Iterator[Sequence[Worker]]:
    """Starts the workers on the hosts of `plan.slots`; none is left when the context ends, whatever ends it.

    Args:
      remote_shell: a command that takes a host and a command line; hosts of this machine need none.
      is_horovod: they find each other as Horovod's processes; else through TF_CONFIG.

    Raises:
      UserError: Horovod is not installed, or the remote shell.
    """
    hosts = [host_of(slot) for slot in plan.slots]
    if not all(map(is_here, hosts)):
        _check_remote_shell(remote_shell)
    with contextlib.ExitStack() as at_end:
        assign = None
        if is_horovod:
            address = _find_address(hosts)
            listens_on = address if address in LOOPBACK else ""
            assign = at_end.enter_context(serve_rendezvous(address, listens_on=listens_on))
        shells = [_ShellHost(host, remote_shell, plan.environment) for host in hosts]

        def close_shells(_: threading.Thread) -> None:
            for shell in reversed(shells):
                shell.close()

        yield at_end.enter_context(
            start_hosted(plan, output, lambda _: list(zip(hosts, shells, strict=True)), assign, close_shells)
        )


def _check_remote_shell(command: str) -> None:
    try:
        program = shlex.split(command)[0]
    except (ValueError, IndexError):
        program = ""
    if shutil.which(program) is None:
        raise UserError(
            f"--remote_shell is {command!r}, and there is no such program here. Install ssh, or name another."
        )


class _ShellHost:
    """Client of a `worker_host` process, which a remote shell starts on a host."""

    def __init__(self, host: str, remote_shell: str, environment: Mapping[str, str]) -> None:
        agent = [sys.executable, "-m", "tfdist.launch.worker_host"]
        if not is_here(host):
            line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(agent)}"
            agent = [*shlex.split(remote_shell), host, line]
        self._host = host
        self.inherited: Mapping[str, str] = (
            {} if is_here(host) else {n: v for n, v in environment.items() if not _is_host_specific(n)}
        )
        self._popen = subprocess.Popen(agent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._writing = threading.Lock()
        self._asking = threading.Lock()

    def send(self, signal_number: int) -> None:
        with contextlib.suppress(HostLostError):
            self._write("send", [signal_number])

    def close(self) -> None:
        """Ends the connection, and with it the worker."""
        with contextlib.suppress(OSError):
            assert self._popen.stdin is not None
            self._popen.stdin.close()
        try:
            self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def call(self, method: str, *arguments: Any) -> Any:
        with self._asking:
            self._write(method, arguments)
            assert self._popen.stdout is not None
            line = self._popen.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError as error:
            shown = f"; received {line[:80]!r}" if line else self._describe_end()
            raise HostLostError(f"the connection to {self._host} ended{shown}") from error
        if "error" in answer:
            raise HostLostError(f"{self._host}: {answer['error']}")
        return answer["value"]

    def _describe_end(self) -> str:
        """` (status 255)`; nothing where the process has closed its output and lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f" (status {self._popen.wait(_STATUS_SECONDS)})"
        return ""

    def _write(self, name: str, arguments: Sequence[Any]) -> None:
        request = json.dumps({"name": name, "arguments": list(arguments)}) + "\n"
        try:
            with self._writing:
                assert self._popen.stdin is not None
                self._popen.stdin.write(request.encode())
                self._popen.stdin.flush()
        except (OSError, ValueError) as error:
            shown = self._describe_end() or f": {error}"
            raise HostLostError(f"the connection to {self._host} ended{shown}") from error


def is_here(host: str) -> bool:
    """Whether a host name is one of this machine."""
    return host in (*LOOPBACK, socket.gethostname())


def _is_host_specific(name: str) -> bool:
    return name in HOST_VARIABLES or name.startswith(("SSH_", "XDG_", "LC_", "BASH_FUNC_"))


def _find_address(hosts: Sequence[str]) -> str:
    """The address of this machine under which the hosts find it."""
    others = [host for host in hosts if not is_here(host)]
    if not others:
        return local_workers.HOST
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((others[0], 9))  # sends nothing: the kernel chooses the interface
        except OSError as error:
            raise UserError(f"--hosts_command lists {others[0]!r}, which has no address: {error}.") from error
        return probe.getsockname()[0]
