"""The thread that writes snapshots one after the other, and tidies up behind them.

Invariant: one snapshot is written at a time, in the order of `put`; every error becomes one of `failures`, in
order, and none ends the thread. Once the directory was lost to another run nothing is written or removed any more.
The manager owns one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.checkpoint import catalog
from tfdist.checkpoint.catalog import Entry, list_checkpoints, new_path
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.state import EventSink
from tfdist.checkpoint.write.parts import Part
from tfdist.checkpoint.write.snapshot import SnapshotBuffer
from tfdist.checkpoint.write.writer import Snapshot, write_checkpoint
from tfdist.storage import files
from tfdist.storage.lease import LeaseLostError
from tfdist.telemetry import heartbeat

_NICENESS = 5  # training's threads go first
_REMOVE_PATIENCE_SECONDS = 2.0  # with a store that does not remove; a checkpoint is not held up for that


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of the writer; `is_lost` when another run has taken the directory."""

    step: int | None
    error: BaseException
    is_lost: bool = False


class WriterThread:
    """Writes, commits and prunes.

    Arguments:
      directory, policy, identity, tell, still_ours: as the manager's.
      buffer: given back when a snapshot was written, or has failed to be.
      part: what this worker writes of each checkpoint; None writes all of it.
    """

    def __init__(
        self,
        directory: str,
        policy: CheckpointPolicy,
        *,
        identity: Mapping[str, Any],
        tell: EventSink,
        still_ours: Callable[[], None],
        buffer: SnapshotBuffer,
        part: Part | None = None,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._identity = identity
        self._tell = tell
        self._still_ours = still_ours
        self._buffer = buffer
        self._part = part
        self._num_written = 0
        self._gives_up = False
        self._entries: list[Entry] = []
        self._to_remove: list[str] = []
        self._is_started = False
        self._is_refused = False  # the store did not remove what it was last asked to
        self._lost = False
        self._failures: queue.SimpleQueue[Failure] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting: deque[Snapshot] = deque()
        self._is_busy = True  # with the start
        self.is_closed = False
        self.last_committed_step: int | None = None
        self.last_write_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="tfdist-checkpoint", daemon=True)
        self._thread.start()

    def put(self, snapshot: Snapshot) -> None:
        """Has a snapshot written after those before it."""
        with self._changed:
            self._waiting.append(snapshot)
            heartbeat.storing(True, writer=id(self))
            self._changed.notify_all()

    def failures(self) -> Iterator[Failure]:
        """What went wrong since, in order; each once."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._failures.get_nowait()

    def wait(self) -> None:
        """Returns when nothing is left to write."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_busy)

    def abandon(self) -> None:
        """Has the thread wait for no other worker's part any more, as the run has failed."""
        self._gives_up = True

    def close(self) -> None:
        """Ends the thread when nothing is left to write."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only where the system has it for threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        with self._collect_failure(None):
            self._start()
        while True:
            with self._changed:
                self._is_busy = False
                if not self._waiting:
                    heartbeat.storing(False, writer=id(self))
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self.is_closed)
                if not self._waiting:
                    return
                snapshot, self._is_busy = self._waiting.popleft(), True
            try:
                with self._collect_failure(snapshot.step):
                    self._write(snapshot)
            finally:
                self._buffer.give_back()
            del snapshot  # the next one has the buffer now
            with self._collect_failure(None):
                self._remove_all()

    @contextlib.contextmanager
    def _collect_failure(self, step: int | None) -> Iterator[None]:
        """Makes a failure of an error. Even an exit, which would end the thread in silence and let `wait` hang."""
        try:
            yield
        except BaseException as error:
            self._failures.put(Failure(step, error, is_lost=self._lost))

    def _start(self) -> None:
        """Makes the directory and removes what a crash left in it."""
        self._check_ours()
        files.make_dirs(self._directory)
        if self._part is not None and not self._part.is_chiefs:
            self._is_started = True
            return
        found = list_checkpoints(self._directory)
        self._entries = [entry for entry in found if not entry.is_leftover]
        own = (lambda path: False) if self._part is None else self._part.owns  # another worker may be writing there
        self._to_remove = [entry.path for entry in found if entry.is_leftover and not own(entry.path)]
        self._is_started = True
        if self._to_remove:
            self._tell.info("checkpoint_leftovers_found", paths=list(self._to_remove))
            self._remove_all()

    def _write(self, snapshot: Snapshot) -> None:
        number, self._num_written = self._num_written, self._num_written + 1  # on all workers, whatever fails here
        if self._lost:
            return
        begun = time.perf_counter()
        path = new_path(self._directory, snapshot.step)
        if self._part is not None:
            path = self._part.path(self._directory, snapshot.step, number)
        try:
            if not self._is_started:  # as the store did not answer then
                self._start()
            entry = write_checkpoint(
                path,
                snapshot,
                identity=self._identity,
                still_ours=self._check_ours,
                part=self._part,
                gives_up=lambda: self._gives_up,
            )
        except BaseException as error:
            if self._part is not None and not self._part.is_chiefs:
                with contextlib.suppress(OSError):  # then the chief waits in vain, but not for ever
                    self._part.note_failure(path, error)
            else:
                self._forget(path)
            raise
        self.last_write_seconds = time.perf_counter() - begun
        if entry is None:
            return
        self.last_committed_step = snapshot.step
        assert entry.manifest is not None
        self._tell.info(
            "checkpoint_saved",
            step=entry.step,
            checkpoint=entry.path,
            num_bytes=entry.manifest.num_stored_bytes,
            num_tensor_bytes=entry.manifest.num_tensor_bytes,
            write_seconds=round(self.last_write_seconds, 3),
        )
        self._tidy(entry)

    def _tidy(self, newest: Entry) -> None:
        """Finds out what is not to be kept any more; `_remove_all` removes it."""
        self._entries.append(newest)
        expired = catalog.expired(self._entries, self._policy, newest=newest)
        paths = {entry.path for entry in expired}
        self._entries = [entry for entry in self._entries if entry.path not in paths]
        self._to_remove += paths
        abandoned = [entry.step for entry in expired if entry.step >= newest.step]
        if abandoned:
            self._tell.info("checkpoints_superseded", step=newest.step, steps=abandoned)

    def _remove_all(self) -> None:
        """Removes what is due, which is nobody's hurry.

        What the store refuses to remove is no failed checkpoint: it is tried again after the next commit, from then on
        only while nothing waits to be written, and said once until it goes.
        """
        if self._lost or (self._is_refused and (self._waiting or self._buffer.is_wanted)):
            return
        try:
            with files.impatient(_REMOVE_PATIENCE_SECONDS):
                while self._to_remove:
                    catalog.remove(self._to_remove[-1])
                    self._to_remove.pop()
            self._is_refused = False
        except OSError as error:
            if self._is_refused:
                return
            message = (
                f"{self._to_remove[-1]} is not needed any more, but could not be removed: {error}. Such checkpoints "
                "stay until they can be; this is said once."
            )
            self._tell.warning("checkpoint_not_removed", message=message)
            self._is_refused = True

    def _forget(self, path: str) -> None:
        """Removes what a failed attempt wrote; if the store refuses that, too, after the next commit."""
        self._to_remove.append(path)
        with contextlib.suppress(OSError), files.impatient(_REMOVE_PATIENCE_SECONDS):
            catalog.remove(path)
            self._to_remove.remove(path)

    def _check_ours(self) -> None:
        try:
            self._still_ours()
        except LeaseLostError:  # an OSError says only that the store did not answer
            self._lost = True
            raise
