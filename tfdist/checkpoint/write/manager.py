"""Keeps a run's checkpoints: copies the state at once, and leaves writing, committing and pruning to a thread.

Invariant: a checkpoint is committed whole or does not exist, and training waits for one copy in memory, nothing more,
unless the checkpoint before is still being written. The training loop owns one manager and talks to it between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.checkpoint.format import manifest as manifests
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.state import EventSink, State
from tfdist.checkpoint.write import snapshot
from tfdist.checkpoint.write.parts import Part
from tfdist.checkpoint.write.writer import Snapshot
from tfdist.checkpoint.write.writer_thread import Failure, WriterThread
from tfdist.errors import UserError


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

    Example:

        manager = CheckpointManager(run.directory.checkpoints, policy, identity={"config": digest}, tell=events)
        try:
            stalled = manager.save(State(step, variables, values), metrics={"val_loss": 0.3})  # between two steps
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
        tell: EventSink,
        still_ours: Callable[[], None] = lambda: None,
        part: Part | None = None,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._tell = tell
        self._lost: BaseException | None = None
        self._buffer = snapshot.SnapshotBuffer(max_file_bytes=policy.max_file_bytes)
        self._thread = WriterThread(
            directory,
            policy,
            identity=manifests.to_plain(identity, "identity"),
            tell=tell,
            still_ours=still_ours,
            buffer=self._buffer,
            part=part,
        )

    def prepare(self, tensors: Mapping[str, Any]) -> None:
        """Has the buffer for such tensors allocated, so that the first `save` costs no more than the later ones."""
        self._buffer.reserve(snapshot.views(tensors))

    def save(self, state: State, *, metrics: Mapping[str, float] | None = None) -> float:
        """Copies `state` to the host and has it written; the seconds that training waited.

        Raises:
          UserError: something in the state cannot be kept.
          What `check` raises, about earlier checkpoints.
        """
        self.check()
        if self._thread.is_closed:
            raise RuntimeError("the manager is closed")
        begun = time.perf_counter()
        values = manifests.to_plain(state.values, "values")
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        buffer, waited_seconds = self._buffer.take(snapshot.views(state.tensors))
        self._thread.put(Snapshot(int(state.step), buffer, values, scores))
        stalled = time.perf_counter() - begun
        if waited_seconds >= TOLD_WAIT_SECONDS:
            self._tell.warning(
                "checkpoint_waited",
                step=int(state.step),
                message=f"Training waited {waited_seconds:.1f} s at step {state.step:,} for earlier checkpoints to be "
                "written: they are due more often than the store takes them.",
                seconds=round(waited_seconds, 3),
            )
        return stalled

    def check(self) -> None:
        """Surfaces the writer's errors as `policy.on_error` says. Never waits.

        Raises:
          LeaseLostError of `still_ours`, now and ever after.
          UserError: a checkpoint could not be written, and `on_error` is "stop".
          A bug of the writer, whatever `on_error` is.
        """
        self._surface_all()

    def _surface_all(self, *, goes_on: bool = True) -> None:
        """`check`; with `goes_on` training does after this."""
        for failure in self._thread.failures():
            self._surface(failure, goes_on=goes_on)
        if self._lost is not None:
            raise self._lost

    def wait(self) -> None:
        """Returns when everything saved is committed or has failed; errors surface as in `check`."""
        self._thread.wait()
        self._surface_all(goes_on=False)

    def abandon(self) -> None:
        """Has nothing wait for other workers' parts any more, as the run has failed."""
        self._thread.abandon()

    def close(self) -> None:
        """Waits and ends the thread; errors that did not surface yet do, as in `check`. Closing again does nothing."""
        if self._thread.is_closed:
            return
        self._thread.close()
        self._buffer.close()
        if self._lost is None:
            self._surface_all(goes_on=False)

    @property
    def last_committed_step(self) -> int | None:
        """The step of the last checkpoint that this manager committed."""
        return self._thread.last_committed_step

    @property
    def last_write_seconds(self) -> float:
        """What the last commit took the writer's thread; 0.0 before the first."""
        return self._thread.last_write_seconds

    def _surface(self, failure: Failure, *, goes_on: bool) -> None:
        error = failure.error
        if failure.is_lost:
            self._lost = error
            raise error
        if not isinstance(error, OSError | UserError):
            raise error
        what = "Looking for earlier checkpoints" if failure.step is None else f"The checkpoint of step {failure.step:,}"
        message = f"{what} failed in {self._directory}: {error}. What was there before is intact."
        if self._policy.on_error == "stop":
            raise UserError(
                f"{message} Make room or mend the store, or set policy.CheckpointPolicy.on_error = 'continue' to "
                "train on without a checkpoint."
            ) from error
        self._tell.warning(
            "checkpoint_failed",
            step=failure.step,
            message=f"{message} Training continues." if goes_on else message,
            error=f"{type(error).__name__}: {error}",
        )


TOLD_WAIT_SECONDS = 0.1  # a shorter one costs nothing that is worth a warning
