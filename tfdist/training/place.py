"""Takes possession of a run directory: it can be written, nobody else uses it, and it holds no other experiment.

Invariant: of the workers of a run only the chief looks, and all of them learn what it found. `open_run` calls this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from tfdist.errors import UserError
from tfdist.storage import files, lease
from tfdist.strategies.base import Strategy
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.identity import check_same_experiment


@dataclasses.dataclass(frozen=True)
class Place:
    """A run directory, as this worker has it.

    Attributes:
      is_finished: whether it holds a result already.
      held: the lease, on the chief of a training; None elsewhere.
    """

    is_finished: bool = False
    held: lease.Lease | None = None

    def check(self) -> None:
        """Raises LeaseLostError where another run has taken the directory."""
        if self.held is not None:
            self.held.check()

    def release(self) -> None:
        """Gives the directory back."""
        if self.held is not None:
            self.held.release()


def take_place(
    directory: RunDirectory,
    strategy: Strategy,
    *,
    settings: Callable[[], Mapping[str, str]],
    trains: bool,
    accept_changes: bool,
    notify: Callable[[str], None],
) -> Place:
    """The run directory, made if it is missing. A collective.

    Args:
      directory: of the run.
      strategy: connected.
      settings: what is configured, by name.
      trains: whether to take the lease and to look for an earlier run.
      accept_changes: goes on with a run although other things are trained now.
      notify: takes what the user should know while waiting.

    Raises:
      UserError: it cannot be written, another run has it, or it holds another experiment; on every worker.
    """
    place, problem = Place(), None
    if strategy.topology.is_chief:
        try:
            directory.create()
            if trains:
                place = _taken(directory, settings, accept_changes=accept_changes, notify=notify)
        except (UserError, OSError) as error:
            problem = error if isinstance(error, UserError) else UserError(f"{directory.path} cannot be used: {error}")
    if strategy.any_worker(problem is not None):
        place.release()
        raise problem or UserError(f"The chief cannot use the run directory {directory.path}; its message says why.")
    return dataclasses.replace(place, is_finished=strategy.any_worker(place.is_finished))


def _taken(
    directory: RunDirectory,
    settings: Callable[[], Mapping[str, str]],
    *,
    accept_changes: bool,
    notify: Callable[[str], None],
) -> Place:
    held = lease.acquire(directory.path, owner="a training", notify=notify)
    try:
        if not accept_changes:
            check_same_experiment(directory, settings())
        return Place(files.exists(directory.result), held)
    except BaseException:
        held.release()
        raise
