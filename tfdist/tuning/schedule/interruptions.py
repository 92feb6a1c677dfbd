"""Ends a sweep whose trials are interrupted again and again, and come no further in between.

Invariant: an interruption (a kill from outside, a preemption, a lost worker) says nothing of a trial's values, so it is
never the trial that ends for it. Progress is an evaluation of any trial, a newer checkpoint of the one that was
interrupted, or a trial's end.
"""

from __future__ import annotations

from tfdist.checkpoint import catalog
from tfdist.errors import PeerLostError, UserError
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.run.starts import find_checkpoint_dir

OF_DISK = "its disk failed: "  # begins why a trial was interrupted
MOST_IN_A_ROW = 10  # for each trial that runs at the same time


class Interruptions:
    """The account of one sweep."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._most_at_once = 1
        self._checkpoint_steps: dict[str, int] = {}

    def progressed(self) -> None:
        """Begins the count anew: a trial was evaluated, or ended."""
        self._in_a_row = 0

    def add(self, directory: RunDirectory, why: str, *, num_running: int) -> None:
        """Counts an interruption.

        Args:
          directory: of the run that was interrupted; the newest step in its checkpoints tells whether it came further.
          why: a clause.
          num_running: how many ran, this one included.

        Raises:
          PeerLostError: there were too many in a row; UserError where the last one's disk was full.
        """
        checkpoints = RunDirectory(directory.path, find_checkpoint_dir(directory.path)).checkpoints
        newest = max((step for step, _ in catalog.list_paths(checkpoints)), default=0)
        if newest > self._checkpoint_steps.get(directory.path, 0):
            self._in_a_row = 0
        self._checkpoint_steps[directory.path] = newest
        self._in_a_row += 1
        self._most_at_once = max(self._most_at_once, num_running)
        if self._in_a_row >= MOST_IN_A_ROW * self._most_at_once:
            raise (UserError if why.startswith(OF_DISK) else PeerLostError)(
                f"The sweep makes no progress: {self._in_a_row} interruptions of trials in a row, without an "
                f"evaluation or a newer checkpoint in between. The last, of {directory.path}: {why.rstrip('.')}. Make "
                "room on a full disk, find out who ends these processes (a scheduler; the kernel, for want of memory), "
                "or let trials back up more often (train.checkpoint). The same command resumes it."
            )
