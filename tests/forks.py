"""Python processes for tests that begin with TensorFlow and Keras imported, by a fork in place of six seconds.

`Popen` is `subprocess.Popen`. Where its command is this Python with one of tfdist's commands that train, a script of
this repository, or a program that imports TensorFlow and does not ask what is imported, and its environment differs
from `support.clean_environment()` only in what is read after the imports, the process is a fork of a server, which has
imported TensorFlow, Keras and tfdist and used none of them. What a launcher, a sweep, tfdist new, tfdist prove or a
benchmark starts in turn is forked by a server of its own: the fork server of `multiprocessing` too. So has each Python
of `INSTALLED`, those of other environments with tfdist in them. All else is started as ever.

Invariant: the process is a child of the one that asked for it, with its own pid, command line, environment, working
directory, descriptors, session and signal handlers, and ends as any Python does. Linux alone.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import inspect
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
MODULES = ("tfdist", "tfdist.main", "tfdist.launch", "tfdist.doctor")
OF_TESTS = ("crashes.", "equivalence.", "keras_fit.", "strategies.", "training.", "workers.")
IMPORTED = (
    *("tensorflow", "keras", "tfdist.experiment", "tfdist.config", "tfdist.tuning.find_rate", "h5py"),
    *("sklearn.datasets", "sklearn.model_selection", "tensorboard.summary.writer.record_writer", "google_crc32c"),
)
READ_LATE = (
    *("TF_CONFIG", "TFDIST_", "PYTHONPATH", "STORAGE_EMULATOR_HOST", "XDG_CACHE_HOME", "KERASTUNER_"),
    *("no_proxy", "NO_PROXY", "GCS_RE"),
    "PYTEST_",  # another one in each test
)
PACKAGE = importlib.util.find_spec("tfdist")
CHILD = Path(((PACKAGE and PACKAGE.submodule_search_locations) or [""])[0], "launch", "child.py")
STARTERS = ("tfdist.launch",)
STARTING_VERBS = ("launch", "new", "prove", "sweep")
STARTING_MODES = {"--mode=prove", "--mode=tune"}
SCRIPTS = ("train.py", "snippet.py")  # of the pages of docs/
BENCHMARKS = REPOSITORY / "benchmarks"
PART = "part"  # benchmarks/part.py, as a launcher starts it
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
ROOM = 1 << 16  # bytes for what /proc shows of a process: as much as the server was started with
FORK_SERVER = "from multiprocessing.forkserver import main"  # what `multiprocessing` starts its own by
MOST_DESCRIPTORS = 16
ABOVE_ALL = 512  # a number above those of all descriptors that are passed on
BEGIN = "import sys; sys.path.insert(0, sys.argv[1]); import forks; forks.main()"  # leaves __main__ to the forks
_Popen = subprocess.Popen
_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_lock = threading.Lock()
INSTALLED: set[str] = set()  # Pythons of other environments
_servers: dict[str, socket.socket] = {}  # by Python
_server_environment: dict[str, str] = {}


class Popen(_Popen):
    """As `subprocess.Popen`."""

    def _execute_child(self, *given: Any) -> None:
        names = list(inspect.signature(_Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
        asked = dict(zip(names, given, strict=True))
        command = [os.fspath(part) for part in asked["args"]] if isinstance(asked["args"], (list, tuple)) else []
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        if not _can_fork(command, environment) or asked["preexec_fn"] or asked["pass_fds"] or asked["shell"]:
            super()._execute_child(*given)
            return
        job = {
            "command": command,
            "environment": environment,
            "cwd": os.fspath(asked["cwd"] or os.getcwd()),
            "session": bool(next(value for name, value in asked.items() if name.endswith("start_new_session"))),
            "descriptors": [0, 1, 2],
        }
        ends = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        self.pid = _fork_elsewhere(job, [own if end == -1 else end for own, end in enumerate(ends)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def _spawn_server(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """As `multiprocessing.util.spawnv_passfds`, with its fork server forked."""
    command, environment = [os.fsdecode(path), *arguments[-2:]], dict(os.environ)
    if not command[-1].startswith(FORK_SERVER) or not _can_fork(command, environment):
        return _spawn(path, arguments, descriptors)
    kept = [0, 1, 2, *descriptors]
    job = {"command": command, "environment": environment, "cwd": os.getcwd(), "session": False, "descriptors": kept}
    return _fork_elsewhere(job, kept)


def _can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    if len(command) < 2 or command[0] not in {sys.executable, *INSTALLED} or sys.platform != "linux":
        return False
    if command[1:4] == ["-I", "-S", str(CHILD)]:
        command = command[6:]
        return len(command) > 1 and _can_fork(command, environment)
    is_module = command[1] == "-m" and (command[2] in (*MODULES, *STARTERS, PART) or command[2].startswith(OF_TESTS))
    is_script = command[1] in SCRIPTS or (command[1].endswith(".py") and REPOSITORY in Path(command[1]).parents)
    is_program = command[1] == "-c" and command[2].startswith(FORK_SERVER)
    is_program |= command[1] == "-c" and "import tensorflow" in command[2] and "sys.modules" not in command[2]
    if not (is_module or is_script or is_program) or "--help" in command:
        return False
    expected = _server_environment or _clean()
    changed = {n for n in {*expected, *environment} if expected.get(n) != environment.get(n)}
    return all(name.startswith(READ_LATE) for name in changed)


def _clean() -> dict[str, str]:
    import support

    return support.clean_environment()


def _fork_elsewhere(job: dict[str, Any], descriptors: Sequence[int]) -> int:
    """The pid of a new child of this process that does the job."""
    executable = job["command"][0]
    with _lock:
        if executable not in _servers:
            _servers[executable] = _start_server(executable)
        server = _servers[executable]
        line = json.dumps(job).encode()
        try:
            socket.send_fds(server, [len(line).to_bytes(8, "big")], list(descriptors))
            server.sendall(line)
            return int.from_bytes(_received(server, 8), "big")
        except (EOFError, ConnectionError):
            del _servers[executable]  # the next process gets another server
            raise


def _start_server(executable: str) -> socket.socket:
    global _server_environment
    _server_environment = _clean()
    environment = _server_environment | {"ROOM": " " * ROOM}
    if executable in INSTALLED:
        del environment["PYTHONPATH"]  # which names this repository, as the working directory may be
    ours, theirs = socket.socketpair()
    # What the server forks twice over becomes this process's child.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with theirs:
        _Popen(
            [executable, "-c", BEGIN, str(Path(__file__).parent), str(theirs.fileno()), " " * ROOM],
            env=environment,
            cwd=Path(executable).parent if executable in INSTALLED else None,
            pass_fds=[theirs.fileno()],
        )
    return ours


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError("the server of tests/forks.py is gone")
        data += more
    return data


def serve(connection: socket.socket) -> dict[str, Any]:
    """Forks until the other end hangs up; returns, in a fork, the job that it has to do."""
    size = array.array("i").itemsize
    while True:
        head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MOST_DESCRIPTORS * size))
        if not head:
            os._exit(0)
        descriptors = array.array("i", ancillary[0][2])
        job = json.loads(_received(connection, int.from_bytes(head, "big")))
        told, tell = os.pipe()
        begun, begin = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(tell, pid.to_bytes(8, "big"))
                os._exit(0)
            os.close(begin)
            os.read(begun, 1)  # until the process between is gone, and its place as the parent is taken
            for each in (begun, told, tell):
                os.close(each)
            connection.close()
            apart = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, ABOVE_ALL) for each in descriptors]
            for each in descriptors:
                os.close(each)
            for target, each in zip(job["descriptors"], apart, strict=True):
                os.dup2(each, target)
                os.close(each)
            return job
        os.waitpid(between, 0)
        try:
            connection.sendall(os.read(told, 8))
        except BrokenPipeError:  # who asked was killed
            os._exit(0)
        for each in (told, tell, begun, begin, *descriptors):
            os.close(each)


def become(job: dict[str, Any]) -> NoReturn:
    """Is the process that the job describes, from its first line to its end."""
    os.chdir(job["cwd"])
    if job["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(job["environment"])
    paths = [p for p in sys.path[1:] if p not in _server_environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep)), *paths]
    command = job["command"]
    if command[1:3] == ["-I", "-S"]:
        os.execvp = _run  # what child.py ends with
        command = [command[0], *command[3:]]
    try:
        _run(command[0], command)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            threading._shutdown()  # type: ignore[attr-defined]
            _end(error.code or 0)
        raise


def _end(status: int) -> None:
    """Ends as Python does, but for letting go of each object: that would copy 200 MB of what the server imported.

    Returns where what was printed cannot be written.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(status & 0xFF)


def _run(executable: str, command: Sequence[str]) -> NoReturn:
    _show(command, [f"{name}={value}" for name, value in os.environ.items()])
    sys.orig_argv = list(command)
    if command[1] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *command[3:]]
        if command[2] in STARTERS or STARTING_MODES & {*command} or command[3:4] in [[v] for v in STARTING_VERBS]:
            _start_own_server()
        runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
    elif command[1] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *command[3:]]
        if "subprocess" in command[2] or "--mode=tune" in "".join(command[3:]):
            _start_own_server()
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(command[2], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(command[1:])
        if BENCHMARKS in Path(command[1]).parents:
            _start_own_server()
        if command[1] != str(CHILD):
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[1])))
        runpy.run_path(command[1], run_name="__main__")
    sys.exit()


def _replace(executable: str, command: Sequence[str]) -> NoReturn:
    """As `os.execv`: whatever called it sees no end of the program."""
    status: Any = 1
    try:
        _run(executable, command)
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
    _end(status if isinstance(status, int) else 1)
    os._exit(1)


def _show(*lists: Sequence[str]) -> None:
    """Has /proc show this command line and this environment, see proc_pid_stat(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts_and_ends = [int(fields[number - 3]) for number in (48, 49, 50, 51)]
    for start, end, strings in zip(starts_and_ends[::2], starts_and_ends[1::2], lists, strict=True):
        line = "\0".join(strings).encode()
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _start_own_server() -> None:
    """Gives this process, which has no threads yet, a server of its own, and has all that it starts come from there."""
    global _server_environment
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        os.setsid()
        become(serve(theirs))
    theirs.close()
    _servers[sys.executable] = ours
    _server_environment = dict(os.environ)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    subprocess.Popen = Popen
    multiprocessing.util.spawnv_passfds = _spawn_server  # type: ignore[attr-defined]
    os.execv = _replace  # what a trial of several workers ends with


def trace_threads() -> None:
    """Has coverage, where it measures, trace what TensorFlow calls in threads of its own, which Python does not."""
    if not threading.gettrace():
        return
    import wrapt

    tracers: dict[int, Any] = {}  # by thread: another one at each call would fill the memory

    def trace_calls(script_ops: Any) -> None:
        call = script_ops.FuncRegistry.__call__

        def call_traced(*given: Any) -> Any:
            thread = threading.get_ident()
            if not sys.gettrace():
                sys.settrace(tracers.get(thread) or threading.gettrace())
            try:
                return call(*given)
            finally:
                tracers[thread] = sys.gettrace()

        # What explains an error of a user's code leaves out TensorFlow's frames, of which this is one.
        call_traced.__code__ = call_traced.__code__.replace(co_filename=script_ops.__file__)
        script_ops.FuncRegistry.__call__ = call_traced

    wrapt.register_post_import_hook(trace_calls, "tensorflow.python.ops.script_ops")


def main() -> None:
    global _server_environment
    os.environ.pop("ROOM")
    _server_environment = dict(os.environ)
    connection = socket.socket(fileno=int(sys.argv[2]))
    trace_threads()
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests'
    job = serve(connection)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(job)
