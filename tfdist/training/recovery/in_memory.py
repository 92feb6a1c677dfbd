"""A run's checkpoints in the memory of the chief's machine: taken more often, for the next start after a failure.

Invariant: a state in memory counts only if it is newer than all that the run directory holds, and of the settings that
are trained with now. The loop does not know of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfdist.checkpoint import restore
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.schedule import Schedule
from tfdist.checkpoint.state import State
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.checkpoint.write.memory import MemoryPlace, OnlyWarnings, forget
from tfdist.errors import PreemptedError
from tfdist.training.recovery.recovery import Memory
from tfdist.training.run.directory.identity import lasting
from tfdist.training.run.run import Run


def newest(run: Run, policy: CheckpointPolicy, *, wanted: Callable[[str], bool]) -> tuple[State | None, str]:
    """What is wanted of the newest state in the run directory or in memory, and the directory that it is from.

    Called on the chief.

    Raises:
      OSError: the store does not answer.
    """
    stores = run.directory.checkpoints
    stored = restore.newest(stores, tell=run.events, wanted=wanted)
    place = None if policy.in_memory is None else _place(run, policy)
    if place is not None and (other := place.left_alone()) is not None:
        run.events.warning(
            "memory_left_alone",
            message=f"{run.directory.memory} names the checkpoints in {other}, which are not of this run, or not of "
            "this user alone. They are neither read nor removed. Was the run directory copied or moved?",
        )
    directory = None if place is None else place.find()
    if directory is None or (kept := restore.newest(directory, tell=run.events, wanted=wanted)) is None:
        return stored, stores
    assert kept.manifest is not None
    is_newer = stored is None or kept.step > stored.step
    if is_newer and lasting(kept.manifest.identity["settings"]) == lasting(run.request.settings()):
        return kept, directory
    return stored, stores


@contextlib.contextmanager
def open_memory(
    run: Run, policy: CheckpointPolicy, *, identity: Mapping[str, Any], step: int, source: str
) -> Iterator[Memory | None]:
    """The checkpoints in memory of this start; freed when it ends well or leaves, which comes after storing all.

    Args:
      run: open.
      policy: of the run.
      identity: goes into each checkpoint.
      step: where the run resumes; 0 at its beginning.
      source: the directory that `newest` gave.
    """
    if policy.in_memory is None:
        if run.topology.is_chief and step:
            forget(run.directory.memory)  # what an earlier start may have left there is older than what continues here
        yield None
        return
    schedule = Schedule(policy.in_memory, steps_per_epoch=None, step=step)
    if not run.topology.is_chief:
        yield Memory(None, schedule)
        return
    place = _place(run, policy)
    if (found := place.find()) not in (None, source):
        forget(run.directory.memory, found)
    directory = place.open()
    manager = CheckpointManager(
        directory, policy.in_memory, identity=identity, tell=OnlyWarnings(run.events), still_ours=run.place.check
    )
    frees = True
    try:
        yield Memory(manager, schedule)
    except PreemptedError:
        raise
    except BaseException:
        frees = False
        raise
    finally:
        manager.close()
        if frees:
            forget(run.directory.memory, directory)


def _place(run: Run, policy: CheckpointPolicy) -> MemoryPlace:
    return MemoryPlace(run.directory.memory, policy.memory_dir)
