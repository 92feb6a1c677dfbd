"""Follows a run: the checkpoints that nobody has evaluated yet, and what their evaluations come to.

Invariant: the run that trains knows nothing of it and waits for nothing. A checkpoint has at most one point in
metrics-follow.jsonl, which is written last, so that whatever a kill interrupts is done again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tfdist.checkpoint import catalog, restore
from tfdist.checkpoint.catalog import list_paths
from tfdist.checkpoint.format.manifest import DamagedCheckpoint
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.restore import State
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.telemetry import heartbeat
from tfdist.telemetry.facts import Point
from tfdist.telemetry.records import Unreadable, as_point, read_lines
from tfdist.telemetry.result import find_checkpoint_dir, read_end
from tfdist.telemetry.run_directory import RunDirectory
from tfdist.training.loop.best import VALIDATION, BestMetric
from tfdist.training.recovery.weights import SavedWeights, find_on_chief
from tfdist.training.run.run import Run

POLL_SECONDS = 2.0
NOTHING, END = SavedWeights(""), SavedWeights("", step=-1)  # of a look at the run


class CheckpointFollower:
    """The checkpoints of a run, each to be evaluated once.

    Args:
      run: open, in mode "follow".
      policy: by its `keep_best` the best checkpoint is copied to best/, where the run does not remove it.
      only_newest: passes over checkpoints that a newer one has overtaken.
    """

    def __init__(self, run: Run, policy: CheckpointPolicy | None, *, only_newest: bool) -> None:
        self._run = run
        self._only_newest = only_newest
        self._has_said_waiting = False
        points = map(as_point, read_lines(run.directory.followed, Unreadable())) if run.topology.is_chief else ()
        self._done = {point.checkpoint for point in points if point is not None}
        self._metric: BestMetric | None = None
        self._best: Mapping[str, Any] | None = None
        self._copies: CheckpointManager | None = None  # of the best one
        if policy is not None and policy.keep_best is not None and policy.keep_best.startswith(VALIDATION):
            self._metric = BestMetric(policy.keep_best, policy.larger_is_better, policy)
            self._best = self._metric.read_best(run.directory.best) if run.topology.is_chief else None

    def wait_for_next(self) -> SavedWeights | None:
        """Blocks until there is a checkpoint to evaluate; None once the run has ended and all are. A collective.

        Raises:
          UserError: the store does not answer; on every worker.
        """
        while True:
            heartbeat.beat(heartbeat.BETWEEN)
            found = find_on_chief(self._run, self._find_next)
            if found.path or found.step is not None:
                return found if found.path else None
            if not self._has_said_waiting:
                self._has_said_waiting = True
                self._run.console.message(f"waiting for the next checkpoint of {self._run.directory.path}")
            time.sleep(POLL_SECONDS)

    def _find_next(self) -> SavedWeights:
        path = self._run.directory.path
        directory = RunDirectory(path, find_checkpoint_dir(path))
        has_ended = read_end(directory) is not None  # asked first: after that no checkpoint comes
        paths = list_paths(directory.checkpoints)
        for step, checkpoint in reversed(paths) if self._only_newest else paths:
            if _name(checkpoint) in self._done:
                if self._only_newest:
                    break
                continue
            try:
                state = restore.load(checkpoint)
                return SavedWeights(checkpoint, step, state)
            except (DamagedCheckpoint, FileNotFoundError) as error:
                entry = catalog.read_entry(checkpoint)
                if not entry.is_leftover:  # as one is that the run writes, or has removed meanwhile
                    self._done.add(_name(checkpoint))
                    message = f"Passed over the checkpoint of step {step:,}: {error}"
                    self._run.events.warning("checkpoint_passed_over", step=step, message=message)
        return END if has_ended else NOTHING

    def record(self, weights: SavedWeights, results: Mapping[str, Any]) -> None:
        """Keeps the results of a checkpoint's evaluation, on the chief.

        Raises:
          UserError: the results lack the metric that names the best checkpoint.
        """
        state = weights.state
        if state is None or state.manifest is None:
            return
        steps_per_epoch = state.manifest.identity.get("steps_per_epoch")
        epoch = -(-state.step // steps_per_epoch) if steps_per_epoch else 0
        named = {f"{VALIDATION}{name}": value for name, value in results.items()}
        if self._metric is not None:
            best = self._metric.newest(self._best, named, step=state.step, epoch=epoch)
            if best is not self._best:
                self._copy(state, {name: value for name, value in named.items() if isinstance(value, int | float)})
                self._best = best
        name = _name(weights.path)
        self._run.metrics.log(Point(step=state.step, epoch=epoch, split="eval", metrics=results, checkpoint=name))
        self._done.add(name)

    def _copy(self, state: State, metrics: Mapping[str, float]) -> None:
        """Writes the best checkpoint to best/, in place of the one before."""
        run = self._run
        if self._copies is None:
            assert state.manifest is not None
            self._copies = CheckpointManager(
                run.directory.best,
                CheckpointPolicy(keep_last=1),
                identity=state.manifest.identity,
                tell=run.events,
                still_ours=run.claim.check,
            )
        self._copies.save(state, metrics=metrics)
        self._copies.wait()

    def close(self) -> None:
        """Ends the thread that copies."""
        if self._copies is not None:
            self._copies.close()


def _name(checkpoint: str) -> str:
    return checkpoint.rpartition("/")[2]
