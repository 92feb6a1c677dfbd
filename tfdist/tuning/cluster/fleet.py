"""All places where the trials of a sweep over a cluster run: those of the chief's machine, and those of its workers.

Invariant: seen from the chief they are one `Workers`; only the place of a trial says where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tfdist.tuning.cluster.remote_places import RemotePlaces
from tfdist.tuning.schedule.workers import Ended, Job, Next, Place, Workers


class Fleet:
    """Local places first, then those of workers.

    Args:
      local: of this machine; there may be none.
      remote: of the workers that join.
    """

    def __init__(self, local: Workers[Job], remote: RemotePlaces) -> None:
        self._local, self._remote = local, remote

    def fileno(self) -> int:
        return self._local.fileno()

    @property
    def num_free(self) -> int:
        return self._local.num_free + self._remote.num_free

    @property
    def next_free(self) -> Place:
        return self._local.next_free if self._local.num_free else self._remote.next_free

    @property
    def running(self) -> list[Job]:
        return self._local.running + self._remote.running

    def start(self, job: Job, parameters: Sequence[str]) -> None:
        if self._local.num_free:
            self._local.start(job, parameters)
        else:
            self._remote.start(job)

    def build(self, upcoming: Next) -> None:
        """Nothing: a trial that is built has its run directory, and which machine will be free first is not known."""

    def stop(self, job: Job) -> None:
        (self._local if any(job is each for each in self._local.running) else self._remote).stop(job)

    def ended(self) -> Iterator[Ended[Job]]:
        return itertools.chain(self._local.ended(), self._remote.ended())

    def dismiss(self, status: int, message: str) -> None:
        """Sends the workers away: the sweep has ended."""
        self._remote.dismiss(status, message)

    def close(self) -> None:
        """Ends what runs here; workers that were not dismissed wait for the chief to come back."""
        self._local.close()
        self._remote.close()
