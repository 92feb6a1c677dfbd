"""One run at a time on a directory: the second is refused, and a run whose place was taken finds out.

Invariant: of two that call `check` on one directory at most one passes, a stopped process that wakes up among them. A
lease ends with its process, also by SIGKILL: at once on a local path, where it is a lock of the operating system, and
on gs:// at once for a restart on the same machine, else after `LAPSE_SECONDS` without renewal. No time of day
counts. Whoever commits to a run directory holds one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import json
import os
import pathlib
import socket
import threading
import time
import weakref
from collections.abc import Callable

from tfdist.errors import InUseError, UserError, is_whole_number
from tfdist.storage import files
from tfdist.storage.gcs_requests import SupersededError
from tfdist.storage.gcs_transfers import delete, look_up, upload

NAME = ".lease"
RENEW_SECONDS = 5.0
LAPSE_SECONDS = 30.0
LOCAL_WAIT_SECONDS = 2.0  # for a process that is just ending
REMOTE_WAIT_SECONDS = LAPSE_SECONDS + 10.0
_RELEASE_PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


_open_leases: weakref.WeakSet[_FileLease] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closes a forked child's copies of the locked files: it would keep the lock of a parent that was killed."""
    for lease in list(_open_leases):
        lease.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _now() -> float:
    """Seconds of a clock that also counts while the machine is suspended, as a virtual machine may be."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaseLostError(InUseError):
    """Another run has taken the directory."""


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that holds a lease.

    Attributes:
      name: what the owner calls itself.
      host: the machine's name.
      pid: the process.
      since: when it took the lease, UTC.
      process: what tells this process from all others of the machine: boot, namespace of processes, start.
    """

    name: str
    host: str
    pid: int
    since: str
    process: tuple[str, str, str]

    def __str__(self) -> str:
        return f"{self.name} (host {self.host}, process {self.pid}, since {self.since})"

    def encode(self) -> bytes:
        """The JSON text of a lease's file."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Owner:
        """Decodes a lease's owner; an unknown one if the lease cannot be read."""
        try:
            held = json.loads(data)
            owner = cls(**{**held, "process": tuple(held["process"])})
            if not is_whole_number(owner.pid, least=0) or len(owner.process) != 3:
                raise ValueError
            texts = (owner.name, owner.host, owner.since, *owner.process)
            if not all(isinstance(text, str) and text.isprintable() for text in texts):
                raise ValueError
            return owner
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("another run", "unknown", 0, "an unknown time", ("", "", ""))

    def is_dead(self) -> bool:
        """Returns whether the owner has certainly ended: a process of this machine that is no more."""
        boot, namespace, start = self.process
        if self.host != socket.gethostname() or not boot or (boot, namespace) != _identify_process(os.getpid())[:2]:
            return False
        return _identify_process(self.pid)[2] != start


def acquire(
    directory: files.StrPath,
    *,
    owner: str,
    notify: Callable[[str], None],
    wait_seconds: float | None = None,
    name: str = NAME,
) -> Lease:
    """Takes the lease of a directory, or of what one mode writes there.

    Args:
      directory: exists, or is gs://.
      owner: what a second run is told, such as "training".
      notify: takes a line that says what is waited for.
      wait_seconds: how long to wait for another to give it back, or to lapse; by default long enough for one whose
        process is gone.
      name: of the file; of two leases with different names neither knows of the other.

    Raises:
      InUseError: another live run has it.
      UserError: it is a symbolic link.
      OSError: the store failed.
    """
    directory = os.fspath(directory)
    path = files.join(directory, name)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    me = Owner(owner, socket.gethostname(), os.getpid(), since, _identify_process(os.getpid()))
    is_remote = files.is_remote(directory)
    if wait_seconds is None:
        wait_seconds = REMOTE_WAIT_SECONDS if is_remote else LOCAL_WAIT_SECONDS
    deadline, told = _now() + wait_seconds, False
    take = functools.partial(_lock_object, seen={}) if is_remote else _lock_file
    while isinstance(taken := take(path, me, notify), Owner):
        left = deadline - _now()
        if left <= 0:
            raise InUseError(f"{directory} is in use by {taken}. Wait for its end, or give another --run_dir.")
        if not told:
            notify(f"{directory} is held by {taken}; waiting up to {wait_seconds:.0f} s for it")
            told = True
        time.sleep(min(_POLL_SECONDS, left))
    return taken


def _lock_file(path: str, me: Owner, notify: Callable[[str], None]) -> _FileLease | Owner:
    """Locks a file, or finds its owner. It goes when it is released, so a lock counts only on the file of that name."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a symbolic link, which tfdist does not follow. Remove it.") from error
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = Owner.decode(os.pread(descriptor, 1 << 16, 0))
        os.close(descriptor)
        return other
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
        notify(f"{path} cannot be locked on this file system: nothing keeps a second run away")
    if not _is_named(descriptor, path):
        os.close(descriptor)
        return _lock_file(path, me, notify)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, me.encode(), 0)
    return _FileLease(path, descriptor)


class _FileLease:
    """A directory that is this process's by a lock."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        _open_leases.add(self)

    def leave_to_parent(self) -> None:
        """Closes the locked file without a change of it, in a forked child."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def check(self) -> None:
        """Raises LeaseLostError where the directory is not this process's any more. Call it before each commit."""
        if self._descriptor is None or not _is_named(self._descriptor, self._path):
            raise LeaseLostError(f"{self._path} is not this run's any more: it was removed. Nothing more is written.")

    def release(self) -> None:
        """Deletes the lock file and unlocks the directory. Releasing again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if _is_named(descriptor, self._path):
            os.unlink(self._path)
        os.close(descriptor)


def _lock_object(path: str, me: Owner, notify: Callable[[str], None], seen: dict[int, float]) -> _ObjectLease | Owner:
    """Writes an object, a new one or in the place of one whose owner is gone, or finds the owner.

    Args:
      seen: when each generation of the object was first seen; this machine's own watching alone counts.
    """
    generation, other = _read_owner(path)
    if other is not None:
        lapsed = _now() - seen.setdefault(generation, _now()) > LAPSE_SECONDS
        if not lapsed and not other.is_dead():
            return other
    try:
        generation = upload(path, [memoryview(me.encode())], replaces=generation)
    except SupersededError:  # another was quicker
        return _read_owner(path)[1] or _lock_object(path, me, notify, seen)
    if other is not None:
        notify(f"took over from {other}, which has ended")
    return _ObjectLease(path, me, generation)


def _read_owner(path: str) -> tuple[int, Owner | None]:
    """The generation of a lease and its owner; 0 and None where there is none."""
    try:
        return look_up(path).generation, Owner.decode(files.read(path))
    except FileNotFoundError:
        return 0, None


class _ObjectLease:
    """A lease of a directory in a bucket: an object, renewed by compare-and-set on its generation."""

    def __init__(self, path: str, me: Owner, generation: int) -> None:
        self._path, self._me = path, me
        self._generation = generation
        self._renewed = _now()
        self._lost = False
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_released, name="tfdist-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        with self._lock:
            if not self._lost and _now() - self._renewed > 2 * RENEW_SECONDS:
                self._renew()
            if self._lost or self._ending.is_set():
                raise LeaseLostError(
                    f"{self._path} is not this run's any more: another run took it. Nothing more is written."
                )

    def release(self) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(2 * _RELEASE_PATIENCE_SECONDS)
        if not self._lost and not self._thread.is_alive():  # which would store it again
            with contextlib.suppress(OSError), files.limit_patience(_RELEASE_PATIENCE_SECONDS):  # it lapses by itself
                delete(self._path, self._generation)

    def _renew_until_released(self) -> None:
        with files.limit_patience(_RELEASE_PATIENCE_SECONDS):
            while not self._ending.wait(RENEW_SECONDS):
                with self._lock:
                    if self._lost:
                        return
                    try:
                        self._renew()
                    except OSError:
                        continue  # the next one tries again, as `check` does, which raises it

    def _renew(self) -> None:
        try:
            self._generation = upload(self._path, [memoryview(self._me.encode())], replaces=self._generation)
            self._renewed = _now()
        except SupersededError:
            generation, owner = _read_owner(self._path)
            self._lost = owner != self._me
            self._generation = generation  # of a renewal that was given up, and had been stored


def _is_named(descriptor: int, path: str) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


Lease = _FileLease | _ObjectLease


def _identify_process(pid: int) -> tuple[str, str, str]:
    """Boot, namespace of processes and start time of a process; empty strings where Linux does not say."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", "", ""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return boot, namespace, ""
    return boot, namespace, "" if fields[0] in "ZX" else fields[19]  # proc(5): a zombie has ended
