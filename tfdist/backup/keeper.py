"""Keeps a run's backups: copies the state at once, and leaves writing, committing and pruning to a thread.

Invariant: a backup is committed whole or does not exist, and training waits for one copy in memory, nothing more,
unless both buffers are still being written. The training loop owns one keeper and talks to it between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tfdist.backup.policy import BackupPolicy
from tfdist.backup.state import State


class Teller(Protocol):
    """What of `telemetry.events.EventLog` the backups use."""

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None: ...
    def warning(
        self, event: str, *, step: int | None = None, message: str | None = None, **details: object
    ) -> None: ...


class BackupKeeper:
    """The backups of one run, in one directory.

    Arguments:
      directory: `RunDirectory.backups`; made when missing.
      policy: how to write and what to keep.
      identity: JSON-able, goes into each manifest: digest of the configuration, versions, strategy, worker count.
      tell: gets events, only ever from the thread that calls this object.
      still_ours: called before each commit, in the writer's thread; raises when another run has taken the directory.
    """

    def __init__(
        self,
        directory: str,
        policy: BackupPolicy,
        *,
        identity: Mapping[str, Any],
        tell: Teller,
        still_ours: Callable[[], None] = lambda: None,
    ) -> None:
        raise NotImplementedError

    def save(self, state: State, *, metrics: Mapping[str, float] | None = None) -> float:
        """Copies `state` to the host and has it written; the seconds that training waited."""
        raise NotImplementedError

    def check(self) -> None:
        """Tells what the writer did since, and surfaces its errors as `policy.on_error` says. Never waits."""
        raise NotImplementedError

    def wait(self) -> None:
        """Returns when everything saved is committed or has failed; errors surface as in `check`."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits and ends the thread; errors surface as in `check`. Closing again does nothing."""
        raise NotImplementedError

    @property
    def last_saved_step(self) -> int | None:
        """The step of the last `save`."""
        raise NotImplementedError

    @property
    def last_committed_step(self) -> int | None:
        """The step of the last backup that this keeper committed."""
        raise NotImplementedError

    @property
    def stall_seconds(self) -> float | None:
        """What the last save cost training; None before the first."""
        raise NotImplementedError

    @property
    def write_seconds(self) -> float | None:
        """What the last commit took the writer's thread; None before the first."""
        raise NotImplementedError
