"""Keeps a run's checkpoints: copies the state at once, and leaves writing, committing and pruning to a thread.

Invariant: a checkpoint is committed whole or does not exist, and training waits for one copy in memory, nothing more,
unless the checkpoint before is still being written. Snapshots are written one at a time, in the order of `save`; no
error ends the thread. Once the directory was lost to another run nothing is written or removed any more. The training
loop owns one manager and talks to it between steps.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.checkpoint import catalog
from tfdist.checkpoint.catalog import Entry, list_checkpoints
from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write import snapshot as snapshots
from tfdist.checkpoint.write.writer import Part, Snapshot, write_checkpoint
from tfdist.errors import UserError
from tfdist.storage import files
from tfdist.storage.lease import LeaseLostError
from tfdist.telemetry import heartbeat
from tfdist.telemetry.events import EventLog

LEAST_WAIT_SECONDS = 0.1  # a shorter one costs nothing that is worth a warning
_NICENESS = 5  # training's threads go first
_REMOVE_PATIENCE_SECONDS = 2.0  # with a store that does not remove; a checkpoint is not held up for that


class CheckpointManager:
    """The checkpoints of one run, in one directory.

    Arguments:
      directory: `RunDirectory.checkpoints`; made when missing.
      policy: how to write and what to keep.
      identity: JSON-able, goes into each manifest: digest of the configuration, versions, strategy, worker count.
      tell: gets events, from the writer's thread too.
      part: what this worker writes of each checkpoint; None: one worker writes all. With parts every worker has a
        manager, and saves the same steps in the same order.
      still_ours: called before each commit, in the writer's thread; raises LeaseLostError when another run has taken
        the directory, OSError when the store does not answer.

    Attributes:
      last_committed_step: the step of the last checkpoint that this manager committed; None before the first.
      last_write_seconds: what the last commit took the writer's thread; 0.0 before the first.

    Example:

        manager = CheckpointManager(run.directory.checkpoints, policy, identity={"config": digest}, tell=events)
        try:
            manager.save(State(step, variables, values), metrics={"val_loss": 0.3})  # between two steps
            manager.check()  # at every boundary
        finally:
            manager.close()
    """

    def __init__(
        self,
        directory: str,
        policy: CheckpointPolicy,
        *,
        identity: Mapping[str, Any],
        tell: EventLog,
        still_ours: Callable[[], None] = lambda: None,
        part: Part | None = None,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._identity = manifests.to_plain(identity, "identity")
        self._tell = tell
        self._still_ours = still_ours
        self._part = part or Part(index=0, count=1, start=uuid.uuid4().hex[:12])
        self._buffer = snapshots.SnapshotBuffer(max_file_bytes=policy.max_file_bytes)
        self.last_committed_step: int | None = None
        self.last_write_seconds = 0.0
        self._loss: LeaseLostError | None = None  # once it has surfaced
        self._is_closed = False
        # Of the thread
        self._num_handled = 0
        self._entries: list[Entry] = []
        self._to_remove: list[str] = []
        self._is_started = False
        self._is_refused = False  # the store did not remove what it was last asked to
        self._is_lost = False
        self._gives_up = False
        self._failures: queue.SimpleQueue[tuple[int | None, BaseException]] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "tfdist-checkpoint")
        self._thread.submit(self._begin)

    def prepare(self, tensors: Mapping[str, Any]) -> None:
        """Has the buffer for such tensors allocated, so that the first `save` costs no more than the later ones."""
        self._buffer.reserve(snapshots.view_arrays(tensors))

    def save(self, state: State, *, metrics: Mapping[str, float] | None = None) -> None:
        """Copies `state` to the host and has it written.

        Raises:
          UserError: something in the state cannot be kept.
          What `check` raises, about earlier checkpoints.
        """
        self.check()
        values = manifests.to_plain(state.values, "values")
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        buffer, waited_seconds = self._buffer.take(snapshots.view_arrays(state.tensors))
        heartbeat.set_writing_checkpoint(True, writer=id(self))
        self._thread.submit(self._handle, Snapshot(int(state.step), buffer, values, scores))
        if waited_seconds >= LEAST_WAIT_SECONDS:
            self._tell.warning(
                "checkpoint_waited",
                step=int(state.step),
                message=f"Training waited {waited_seconds:.1f} s at step {state.step:,} for earlier checkpoints to be "
                "written: they are due more often than the store takes them.",
                seconds=round(waited_seconds, 3),
            )

    def check(self) -> None:
        """Surfaces the writer's errors as `policy.on_error` says. Never waits.

        Raises:
          LeaseLostError of `still_ours`, now and ever after.
          UserError: a checkpoint could not be written, and `on_error` is "stop".
          A bug of the writer, whatever `on_error` is.
        """
        while not self._failures.empty():
            self._surface(*self._failures.get_nowait())
        if self._loss is not None:
            raise self._loss

    def wait(self) -> None:
        """Returns when everything saved is committed or has failed; errors surface as in `check`."""
        self._thread.submit(lambda: None).result()
        self.check()

    def abandon(self) -> None:
        """Has nothing wait for other workers' parts any more, as the run has failed."""
        self._gives_up = True

    def close(self) -> None:
        """Waits for the writer thread and ends it; raises a pending error as `check` does. Works once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.shutdown()
        self._buffer.close()
        if self._loss is None:
            self.check()

    def _surface(self, step: int | None, error: BaseException) -> None:
        if isinstance(error, LeaseLostError):
            self._loss = error
        if isinstance(error, LeaseLostError) or not isinstance(error, OSError | UserError):
            raise error
        what = "Looking for earlier checkpoints" if step is None else f"The checkpoint of step {step:,}"
        message = f"{what} failed in {self._directory}: {error}. What was there before is intact."
        if self._policy.on_error == "stop":
            raise UserError(
                f"{message} Make room or mend the store, or set policy.CheckpointPolicy.on_error = 'continue' to "
                "train on without a checkpoint."
            ) from error
        described = f"{type(error).__name__}: {error}"
        self._tell.warning("checkpoint_failed", step=step, message=message, error=described)

    # In the thread

    def _begin(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only where the system has it for threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        with self._collect_failure(None):
            self._start()

    def _handle(self, snapshot: Snapshot) -> None:
        heartbeat.set_writing_checkpoint(True, writer=id(self))  # again, where the one before ended after `save`
        try:
            with self._collect_failure(snapshot.step):
                self._write(snapshot)
        finally:
            self._buffer.give_back()
        with self._collect_failure(None):
            self._remove_all()
        self._num_handled += 1
        heartbeat.set_writing_checkpoint(False, writer=id(self))

    @contextlib.contextmanager
    def _collect_failure(self, step: int | None) -> Iterator[None]:
        """Keeps an error for `check`, even an exit, which would end in silence what is done here."""
        try:
            yield
        except BaseException as error:
            self._failures.put((step, error))

    def _start(self) -> None:
        """Makes the directory, lists its checkpoints, and removes what a crash left of others."""
        self._check_ours()
        files.make_dirs(self._directory)
        self._is_started = not self._part.is_chiefs
        if self._is_started:  # another worker, the chief, commits what this one writes a part of
            return
        found = list_checkpoints(self._directory)
        self._entries = [entry for entry in found if not entry.is_leftover]
        leftovers = [entry.path for entry in found if entry.is_leftover]
        own = self._part.start  # where another worker may write already
        self._to_remove = [path for path in leftovers if not path.rpartition("-")[2].startswith(own)]
        self._is_started = True
        if self._to_remove:
            self._tell.info("checkpoint_leftovers_found", paths=list(self._to_remove))
            self._remove_all()

    def _write(self, snapshot: Snapshot) -> None:
        if self._is_lost:
            return
        begun = time.perf_counter()
        path = self._part.path(self._directory, snapshot.step, self._num_handled)
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
            if not self._part.is_chiefs:
                with contextlib.suppress(OSError):  # then the chief waits in vain, but not for ever
                    files.make_dirs(path)
                    self._part.note(path, {"error": f"{type(error).__name__}: {error}"})
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
        expired = catalog.find_expired(self._entries, self._policy, newest=newest)
        paths = {entry.path for entry in expired}
        self._entries = [entry for entry in self._entries if entry.path not in paths]
        self._to_remove += paths
        abandoned = [entry.step for entry in expired if entry.step >= newest.step]
        if abandoned:
            self._tell.info("checkpoints_superseded", step=newest.step, steps=abandoned)

    def _remove_all(self) -> None:
        """Removes what is due, which is nobody's hurry.

        What the store refuses to remove is no failed checkpoint: it is tried again after the next commit, and said once
        until it goes.
        """
        if self._is_lost:
            return
        try:
            with files.limit_patience(_REMOVE_PATIENCE_SECONDS):
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
        with contextlib.suppress(OSError), files.limit_patience(_REMOVE_PATIENCE_SECONDS):
            catalog.remove(path)
            self._to_remove.remove(path)

    def _check_ours(self) -> None:
        try:
            self._still_ours()
        except LeaseLostError:  # an OSError says only that the store did not answer
            self._is_lost = True
            raise
