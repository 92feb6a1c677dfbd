"""When a run saves, what it keeps and how it writes: the settings of `train.backup`.

Invariant: a policy that exists is consistent; whatever cannot be meant is a UserError when it is made. A gin file
names it (`train.backup = @BackupPolicy()`); the keeper, the schedule and the catalog read it.
"""

from __future__ import annotations

import dataclasses
import math
import os

from tfdist.errors import EXIT_PREEMPTED, UserError, is_whole_number, suggest
from tfdist.telemetry.metric_direction import larger_is_better

ON_ERROR = ("continue", "stop")
COMPRESSIONS = ("none", "lz4", "zstd", "auto")
BEST_MODES = ("min", "max", "auto")


@dataclasses.dataclass(frozen=True)
class BackupPolicy:
    """Settings of a run's backups.

    Arguments:
      every_steps, every_seconds, every_epochs: when to save; several may be given, and the first that is due counts.
        None of the three: automatic, the interval √(2 · cost · mean time between failures) of Young (1974,
        "A first order approximation to the optimum checkpoint interval"), from the measured cost.
      mean_seconds_between_failures: for the automatic interval.
      memory_every_steps: how often to keep a backup in the memory of the chief's machine besides; None: not at all.
      memory_dir: a directory of a file system in memory, for those.
      keep_last: how many of the newest backups stay.
      keep_every_steps: backups whose step is a multiple of this stay for good.
      keep_best: a metric's name, such as "val_accuracy"; the backup with its best value stays, too.
      best_mode: whether "min" or "max" is best; "auto" tells it by the metric's name.
      compression: "none", "lz4", "zstd", or "auto": whether it pays is measured on the first backup.
      max_file_bytes: a backup's files are split at this size; a tensor larger than it stands alone in a file.
      on_error: what a failed write does to the training: "continue" with a warning, or "stop".
      preempted_exit_status: of a process that was told to leave and has saved.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    every_epochs: int | None = None
    mean_seconds_between_failures: float = 3600.0
    memory_every_steps: int | None = None
    memory_dir: str = "/dev/shm"
    keep_last: int = 2
    keep_every_steps: int | None = None
    keep_best: str | None = None
    best_mode: str = "auto"
    compression: str = "auto"
    max_file_bytes: int = 256 * 2**20
    on_error: str = "continue"
    preempted_exit_status: int = EXIT_PREEMPTED

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs", "keep_every_steps", "memory_every_steps"):
            if getattr(self, name) is not None:
                self._require_whole(name, or_none=True)
        self._require_whole("keep_last", or_none=False)
        self._require_whole("preempted_exit_status", or_none=False, least=0)
        self._require_whole("max_file_bytes", or_none=False, least=4096)
        if self.every_seconds is not None:
            self._require_seconds("every_seconds", or_none=True)
        self._require_seconds("mean_seconds_between_failures", or_none=False)
        if self.memory_every_steps is not None:
            self._require_memory_dir()
        self._require_one_of("best_mode", BEST_MODES)
        self._require_one_of("compression", COMPRESSIONS)
        self._require_one_of("on_error", ON_ERROR)
        if self.keep_best is not None:
            self._require_best_metric()

    @property
    def is_automatic(self) -> bool:
        """Whether the interval is Young's."""
        return self.every_steps is None and self.every_seconds is None and self.every_epochs is None

    @property
    def in_memory(self) -> BackupPolicy | None:
        """How the backups in memory are made; None: there are none."""
        if self.memory_every_steps is None:
            return None
        return BackupPolicy(every_steps=self.memory_every_steps, keep_last=1, compression="none")

    @property
    def larger_is_better(self) -> bool:
        """Whether larger values of `keep_best`, which must be set, are better.

        Raises:
          UserError: `best_mode` is "auto", and the metric's name does not tell.
        """
        direction = larger_is_better(self.keep_best) if self.best_mode == "auto" else self.best_mode == "max"
        if direction is None:
            raise UserError(
                f"train.backup.keep_best is {self.keep_best!r}, a name that does not tell whether small or large "
                "values are good. Set train.backup.best_mode to 'min' or 'max'."
            )
        return direction

    def _require_whole(self, name: str, *, or_none: bool, least: int = 1) -> None:
        value = getattr(self, name)
        if not is_whole_number(value, least=least):
            raise UserError(
                f"train.backup.{name} is {value!r}; it must be a whole number of at least {least}"
                f"{', or None' if or_none else ''}."
            )

    def _require_seconds(self, name: str, *, or_none: bool) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise UserError(
                f"train.backup.{name} is {value!r}; it must be a number of seconds above 0"
                f"{', or None' if or_none else ''}."
            )

    def _require_one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise UserError(
                f"train.backup.{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}."
                f"{suggest(value, allowed) if isinstance(value, str) else ''}"
            )

    def _require_memory_dir(self) -> None:
        if not isinstance(self.memory_dir, str) or not os.path.isdir(self.memory_dir):
            raise UserError(
                f"train.backup.memory_dir is {self.memory_dir!r}, which is no directory here; write one of a "
                "file system in memory, such as '/dev/shm', or leave memory_every_steps out."
            )

    def _require_best_metric(self) -> None:
        if not isinstance(self.keep_best, str) or not self.keep_best:
            raise UserError(
                f"train.backup.keep_best is {self.keep_best!r}; it must be a metric's name, such as "
                "'val_accuracy', or None."
            )
