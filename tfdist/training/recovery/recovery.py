"""How a run survives: when it saves, how it leaves when it has to, and where it resumes.

Invariant: what is saved at a boundary brings a run back to exactly there, whatever strategy it continues with. Every
worker takes part in bringing the state together and in agreeing; the chief alone writes and reads. The loop talks to
`Recovery`; experiment.py makes it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from tfdist.checkpoint import restore
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.policy import CheckpointSchedule
from tfdist.checkpoint.preemption import Preemption
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, NotSavedError, PreemptedError, UserError, shorten_list
from tfdist.strategies.strategy import Strategy
from tfdist.telemetry import heartbeat
from tfdist.telemetry.events import EventLog
from tfdist.training.loop.boundaries import Vote
from tfdist.training.step.randomness import read_generators, set_generators
from tfdist.training.step.state import MODEL, OPTIMIZER, SEEDS, TrainingState

RANDOM = "random"
MOST_SHOWN = 20  # variables in one message
OWN_PREFIXES = (MODEL, SEEDS, OPTIMIZER, "loss_scale/", "metrics/")


@dataclasses.dataclass(kw_only=True)
class Recovery:
    """The survival of one run, on one worker.

    Attributes:
      strategy: connected.
      state: of the run.
      manager: on the chief, and where all workers write on every one; None elsewhere.
      schedule: when checkpoints are due; only the chief's clock counts.
      preemption: entered.
      exit_status: of a process that left after saving; one that Ctrl-C had leave has EXIT_INTERRUPTED.
      start_step: of the checkpoint that the run resumes from; None where it begins.
      all_write: every worker stores its share.
      saved_step: of the last checkpoint; -1 before the first.
    """

    strategy: Strategy
    state: TrainingState
    manager: CheckpointManager | None
    schedule: CheckpointSchedule
    preemption: Preemption
    exit_status: int = EXIT_PREEMPTED
    start_step: int | None = None
    all_write: bool = False
    saved_step: int = -1

    def prepare(self) -> None:
        """Has the memory allocated that saving takes. A collective."""
        tensors = self.state.tensors()
        if self.manager is not None:
            self.manager.prepare(self._share(tensors, read_generators()[1]))

    def votes(self, step: int) -> Vote:
        """Returns this worker's vote once `step` steps are done."""
        due = self.strategy.topology.is_chief and self.schedule.is_due(step, time.monotonic())
        return Vote(leave=self.preemption.reason is not None, save=due)

    def check(self) -> None:
        """Surfaces what became of earlier checkpoints."""
        if self.manager is not None:
            self.manager.check()

    def save(
        self, step: int, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray], metrics: Mapping[str, float]
    ) -> None:
        """Copies the state, to be written while training continues. A collective.

        Args:
          step: that is done.
          values: with the variables, all that there is to save.
          arrays: that `values` refers to by name.
          metrics: of this step, for what is kept as the best.
        """
        begun = time.monotonic()
        heartbeat.beat(heartbeat.SAVING)
        tensors = self.state.tensors()
        if self.manager is not None:
            drawn, drawn_arrays = read_generators()
            stored = self._share(tensors, {**arrays, **drawn_arrays})
            self.manager.save(State(step, stored, {**values, RANDOM: drawn}), metrics=metrics)
            self.schedule.record_write(self.manager.last_write_seconds)
        now = time.monotonic()
        self.schedule.record_save(step, now, cost_seconds=now - begun)
        self.saved_step = step
        heartbeat.beat(heartbeat.BETWEEN)

    def _share(self, tensors: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns what this worker stores; what the processes each have besides the variables is the chief's."""
        topology = self.strategy.topology
        if self.all_write:
            tensors = self.state.share(tensors, worker=topology.worker_index, count=topology.num_workers)
        return {**tensors, **(arrays if topology.is_chief else {})}

    @property
    def newest_step(self) -> int | None:
        """The step that a start of this run would resume from, as the chief knows it; None: it would begin anew."""
        committed = None if self.manager is None else self.manager.last_committed_step
        return max((step for step in (self.start_step, committed) if step is not None), default=None)

    def wait_until_stored(self, step: int, *, because: str) -> None:
        """Blocks until the state of `step` is stored, on all workers; a collective. `because` goes into the error.

        Raises:
          NotSavedError: the state of `step`, which was given to `save`, could not be written; on every worker.
        """
        heartbeat.beat(heartbeat.SAVING)
        problem: UserError | None = None
        try:
            if self.manager is not None:
                self.manager.wait()
        except UserError as error:  # with on_error = 'stop'
            problem = error
        is_chief = self.strategy.topology.is_chief
        is_lost = problem is not None or (is_chief and self.newest_step != step)
        if self.strategy.any_worker(is_lost):  # nobody goes before it is stored
            why = "" if problem is None else f" {problem}"
            lost = self.describe_loss(step)
            raise NotSavedError(f"Left at step {step:,}, because {because}, and could not save.{why} {lost}")

    def describe_loss(self, step: int) -> str:
        """Says from where the same command continues once `step` steps are done, and what is lost."""
        newest = self.newest_step
        if not self.strategy.topology.is_chief:
            return "The chief's message says from where the same command continues."
        if newest is None:
            return f"There is no checkpoint: the work of all {step:,} steps is lost, and the same command begins anew."
        return (
            f"The newest checkpoint is of step {newest:,}: the work of the {step - newest:,} steps after it is lost, "
            "and the same command resumes from there."
        )

    def leave(self, step: int) -> NoReturn:
        """Blocks as `wait_until_stored` does, and raises PreemptedError, or NotSavedError."""
        reason = self.preemption.reason or "another worker has to leave"
        self.wait_until_stored(step, because=reason)
        raise PreemptedError(
            f"Left at step {step:,} after saving, because {reason}. The same command resumes from there.",
            exit_status=EXIT_INTERRUPTED if self.preemption.is_interrupt else self.exit_status,
        )


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint to resume from; variables that are not in place yet are in memory until they are.

    Attributes:
      step: that was done.
      values: of the loop; empty where a step alone is given, and nothing was saved.
      arrays: that `values` refers to by name.
      assign: puts the variables and the generators' states in place. A collective.
    """

    step: int
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    assign: Callable[[], None] | None = None

    def restore(self) -> None:
        """Assigns the state to the variables, once; a collective."""
        if self.assign is not None:
            self.assign()
            self.assign = None


class RecoveryStart(NamedTuple):
    """The recovery of a start: how it survives and where it resumes.

    Attributes:
      recovery: of the run; None saves nothing.
      start: where it resumes, to restore once the callbacks have seen what the run began with; None begins it.
      lost_steps: how many steps after that are known to have been done before, on the chief.
      state: of the run.
    """

    recovery: Recovery | None
    start: Checkpoint | None
    lost_steps: int
    state: TrainingState


def load_checkpoint(
    strategy: Strategy,
    state: TrainingState,
    read: Callable[[], State | None],
    *,
    partial: bool,
    tell: EventLog,
) -> Checkpoint | None:
    """Reads a checkpoint for every worker; None where there is none.

    A collective. The chief reads, the others get it from there.

    Args:
      strategy: connected.
      state: of the run.
      read: gives the state to restore; called on the chief.
      partial: leaves out what does not fit, instead of refusing, and says what.
      tell: hears what was left out.

    Raises:
      UserError: it does not fit, or the store does not answer; on every worker.
    """

    choose = functools.partial(_select, state=state, partial=partial, tell=tell)
    if state.is_sharded and strategy.topology.num_workers > 1:
        header, arrays = _read_by_all(strategy, read, choose, lambda name: not state.is_elsewhere(name))
    else:
        header, arrays = _broadcast(strategy, lambda: choose(read()))
    if not header:
        return None
    others = {name: array for name, array in arrays.items() if not name.startswith(OWN_PREFIXES)}

    def assign() -> None:
        state.assign(arrays)
        if RANDOM in header["values"]:
            try:
                set_generators(header["values"][RANDOM], others)
            except (KeyError, TypeError, ValueError) as error:
                raise version_error(header["step"], error) from error

    return Checkpoint(header["step"], header["values"], others, assign)


def version_error(step: int, error: Exception) -> UserError:
    """The error for a checkpoint that is whole and holds other values than this tfdist writes."""
    return UserError(
        f"The checkpoint of step {step:,} is of another version of tfdist: {error}. Use the version that wrote it, or "
        "give another --run_dir; train.start_from takes over its weights."
    )


def _read_by_all(
    strategy: Strategy,
    read: Callable[[], State | None],
    choose: Callable[[State | None], tuple[dict[str, Any], dict[str, np.ndarray]]],
    wanted: Callable[[str], bool],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `choose` takes where workers have slots of their own: the chief finds the checkpoint, every one reads it.

    Raises:
      UserError: it does not fit a worker, or one does not see it; on every worker.
    """
    found = strategy.on_chief(read, "The checkpoints cannot be read")
    path = strategy.read_on_chief(lambda: (found and found.path) or "", "The checkpoints cannot be read")
    if not path:
        return {}, {}

    def choose_here() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return choose(found or restore.load(path, wanted=wanted))
        except DamagedCheckpoint as error:
            raise UserError(f"{error} With train.sharding all workers have to see the run directory.") from error

    return strategy.on_every_worker(choose_here, f"The checkpoint {path} cannot be read")


def _select(
    found: State | None, state: TrainingState, *, partial: bool, tell: EventLog
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Selects what of a checkpoint is to be restored."""
    if found is None:
        return {}, {}
    wanted = {name: spec for name, spec in state.specs().items() if name.startswith(OWN_PREFIXES)}
    own = {n: array for n, array in found.tensors.items() if n.startswith(OWN_PREFIXES) and not state.is_elsewhere(n)}
    others = {name: array for name, array in found.tensors.items() if not name.startswith(OWN_PREFIXES)}
    arrays = restore.match_tensors(own, wanted, partial=partial) | others
    if partial:
        log_left_out(tell, restore.list_differences(own, wanted), f"the checkpoint of step {found.step:,}")
    return {"step": found.step, "values": dict(found.values)}, arrays


def log_left_out(tell: EventLog, lines: Sequence[str], source: str) -> None:
    """Says what a partial restore has left out of `source`; nothing where all fitted."""
    if not lines:
        return
    tell.warning(
        "partially_restored",
        message="\n    ".join([f"Took what fits of {source}, and left out:", *shorten_list(lines, MOST_SHOWN)]),
        left_out=list(lines),
    )


def _broadcast(
    strategy: Strategy, choose: Callable[[], tuple[dict[str, Any], dict[str, np.ndarray]]]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the chief chooses, on every worker."""
    arrays: dict[str, np.ndarray] = {}

    def read() -> tuple[dict[str, Any], list[Any]]:
        header, chosen = choose()
        arrays.update(chosen)
        return header, [[name, list(a.shape), a.dtype.name] for name, a in arrays.items()]

    header, specs = strategy.read_on_chief(read, "The checkpoints cannot be read")
    if strategy.topology.num_workers > 1:
        for name, shape, dtype in specs:
            data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data if name in arrays else None
            kind = tf.dtypes.as_dtype(dtype).as_numpy_dtype
            arrays[name] = np.frombuffer(strategy.broadcast(data), kind).reshape(shape)
    return header, arrays
