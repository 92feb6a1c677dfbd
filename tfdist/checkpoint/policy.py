"""When a run saves, what it keeps and how it writes: the settings of `train.checkpoint`, and when they have it save.

Invariant: a policy that exists is consistent; whatever cannot be meant is a UserError when it is made. A gin file
names it (`train.checkpoint = @CheckpointPolicy()`); the manager and the catalog read it. `CheckpointSchedule` reads no
clock: what is due follows from the steps and seconds passed in. Of several workers one asks and tells the others.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from typing import ClassVar

from tfdist.errors import EXIT_PREEMPTED, UserError
from tfdist.settings.checks import COUNT, SECONDS, Check, one_of, or_none, text, whole_number
from tfdist.settings.declaration import Settings, setting
from tfdist.telemetry.registry import larger_is_better

ON_ERROR = ("continue", "stop")
BEST_MODES = ("min", "max", "auto")
CHIEF, ALL = "chief", "all"
OFF, AUTO = "off", "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointPolicy(Settings):
    """When a run saves, what it keeps and how it writes; all of it may change when a run resumes.

    Of `every_steps`, `every_seconds` and `every_epochs` several may be given, and the first that is due counts. With
    none of the three `CheckpointSchedule` derives the interval from the measured cost.
    """

    NAME: ClassVar[str] = "policy.CheckpointPolicy"

    every_steps: int | None = setting("between two checkpoints", or_none(COUNT), None)
    every_seconds: float | None = setting("the same", or_none(SECONDS), None, unit="seconds")
    every_epochs: int | None = setting("the same", or_none(COUNT), None)
    mean_seconds_between_failures: float = setting(
        "for the interval without any of these three", SECONDS, 3600.0, unit="seconds"
    )
    keep_last: int | None = setting(
        "newest checkpoints to keep; None: 2, or as BackupAndRestore says", or_none(COUNT), None
    )
    keep_every_steps: int | None = setting("also saves and keeps multiples of this", or_none(COUNT), None)
    keep_best: str | None = setting(
        "a metric; also keeps the checkpoint with its best value", or_none(text("val_accuracy")), None
    )
    best_mode: str = setting("which value is best; 'auto': by the metric's name", one_of(*BEST_MODES), "auto")
    writers: str = setting(
        "'all' workers write a share each, into a run directory that all see; train.sharding does so",
        one_of(CHIEF, ALL),
        CHIEF,
    )
    max_file_bytes: int = setting(
        "splits files at this size; a larger tensor has its own",
        whole_number(4096),
        256 * 2**20,
        unit="bytes",
    )
    on_error: str = setting("whether a failed write warns or stops the training", one_of(*ON_ERROR), "continue")
    preempted_exit_status: int = setting("of a process that saved on a signal", whole_number(0), EXIT_PREEMPTED)

    @property
    def larger_is_better(self) -> bool:
        """Whether larger values of `keep_best`, which must be set, are better.

        Raises:
          UserError: `best_mode` is "auto", and the metric's name does not tell.
        """
        assert self.keep_best is not None
        direction = larger_is_better(self.keep_best) if self.best_mode == "auto" else self.best_mode == "max"
        if direction is None:
            raise UserError(
                f"{self.NAME}.keep_best is {self.keep_best!r}, a name that does not tell whether small or large values "
                f"are good. Set {self.NAME}.best_mode to 'min' or 'max'."
            )
        return direction


CHECKPOINT = Check(
    "'auto', 'off', or @policy.CheckpointPolicy() with `from tfdist.checkpoint import policy`",
    lambda value: value in (OFF, AUTO) if isinstance(value, str) else isinstance(value, CheckpointPolicy),
)


def resolve_policy(checkpoint: CheckpointPolicy | str) -> CheckpointPolicy | None:
    """Returns the policy of a setting that passed CHECKPOINT; None: no checkpoints."""
    if isinstance(checkpoint, CheckpointPolicy):
        return checkpoint
    return CheckpointPolicy() if checkpoint == AUTO else None


FIRST_SECONDS = 5.0  # until the first checkpoint of the auto interval, at most, as its cost is not known yet
FIRST_COST = 0.125  # seconds, as which it is taken
LARGEST_SHARE = 0.01  # of the time for which training waits for checkpoints of the auto interval
REMEMBERED_COSTS = 5  # the first checkpoint may wait for its memory, and its cost should not count forever


class CheckpointSchedule:
    """The checkpoints that a policy asks for; of several `every_…` and `keep_every_steps` whichever is due first.

    With no `every_…` set, the interval is √(2 · cost · mean time between failures), which loses the least time to
    checkpoints and to work done twice (J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17(9), 1974). The cost is what training waited, the median of the last ones measured. The
    interval is never so short that training waits for more than 1 % of the time, nor shorter than the last write. How
    long a write takes is no part of the cost: what a failure loses to that is the same for every interval.

    Args:
      policy: what to do.
      steps_per_epoch: for `every_epochs`; None where an epoch's length is not known, which `every_epochs` forbids.
      step: steps done when the loop begins; nothing is due until another is.
    """

    def __init__(self, policy: CheckpointPolicy, *, steps_per_epoch: int | None, step: int = 0) -> None:
        if policy.every_epochs and not steps_per_epoch:
            raise ValueError("every_epochs needs steps_per_epoch")
        self._policy = policy
        periods = policy.every_steps, (policy.every_epochs or 0) * (steps_per_epoch or 0), policy.keep_every_steps
        self._periods = [period for period in periods if period]
        self._step = step
        self._time = 0.0
        self._costs: list[float] = []
        self._write_seconds = 0.0

    def begin(self, now: float) -> None:
        """Training begins; `now` is in seconds of the clock whose readings `is_due` and `record_save` get."""
        self._time = now

    def next_boundary(self, step: int) -> int | None:
        """The first step after `step` at which a checkpoint falls by the count of steps; None: by the clock only."""
        return min(_next_multiples(step, self._periods), default=None)

    def is_due(self, step: int, now: float) -> bool:
        """Whether to back up after `step` steps, at the time `now`."""
        if step <= self._step:
            return False
        if any(boundary <= step for boundary in _next_multiples(self._step, self._periods)):
            return True
        seconds = self.interval_seconds
        return seconds is not None and now - self._time >= seconds

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between checkpoints; None if only steps count."""
        policy = self._policy
        if policy.every_seconds is not None or policy.every_steps or policy.every_epochs:
            return policy.every_seconds
        wait = statistics.median(self._costs or [FIRST_COST])
        best = math.sqrt(2 * wait * policy.mean_seconds_between_failures)
        if not self._costs:
            return min(best, FIRST_SECONDS)
        return max(best, wait / LARGEST_SHARE, self._write_seconds)

    def record_save(self, step: int, now: float, *, cost_seconds: float) -> None:
        """Records that a checkpoint of `step` was taken by `now` and made the training wait for `cost_seconds`."""
        self._step = step
        self._time = now
        self._costs = [*self._costs, cost_seconds][-REMEMBERED_COSTS:]

    def record_write(self, seconds: float) -> None:
        """Records that the last checkpoint took `seconds` from its copy in memory to its commit."""
        self._write_seconds = seconds


def _next_multiples(step: int, periods: list[int]) -> Iterator[int]:
    return ((step // period + 1) * period for period in periods)
