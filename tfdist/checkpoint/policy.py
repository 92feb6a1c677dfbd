"""When a run saves, what it keeps and how it writes: the settings of `train.checkpoint`.

Invariant: a policy that exists is consistent; whatever cannot be meant is a UserError when it is made. A gin file
names it (`train.checkpoint = @CheckpointPolicy()`); the manager, the schedule and the catalog read it.
"""

from __future__ import annotations

import dataclasses
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
    none of the three the interval is √(2 · cost · mean time between failures) of Young (1974, "A first order
    approximation to the optimum checkpoint interval"), from the measured cost.
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
    keep_every_steps: int | None = setting("also keeps checkpoints at multiples of this", or_none(COUNT), None)
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
    """What a setting that passed CHECKPOINT means; None: no checkpoints."""
    if isinstance(checkpoint, CheckpointPolicy):
        return checkpoint
    return CheckpointPolicy() if checkpoint == AUTO else None
