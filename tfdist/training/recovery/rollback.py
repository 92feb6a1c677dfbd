"""Goes back to the newest checkpoint where a step has failed, and trains on from there with other settings.

A step fails whose loss or gradients are not finite, or that finds no memory. The learning rate is lower then, or there
are more microbatches.

Invariant: the other settings are stored before the run goes back, and every start reads them first. So a run that is
killed at any moment of it ends with the weights of one that was not, where both have checkpoints of the same steps. All
workers see the same loss, which was summed over them, and go back together; a lack of memory that one of them alone has
met ends its process, and the next start trains on.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from tfdist.errors import EXIT_PEER_LOST, DivergedError, OutOfMemoryError
from tfdist.settings.checks import COUNT, Check
from tfdist.storage import files
from tfdist.strategies.strategy import Strategy
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import load_record
from tfdist.training.recovery.recovery import Checkpoint

MORE_MICROBATCHES = 2
FACTOR = Check(
    "a factor between 0 and 1, such as 0.1",
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1,
)


@dataclasses.dataclass(frozen=True)
class Rollback:
    """The policy for a loss or gradient that is not finite.

    Attributes:
      rate: multiplies the learning rate for the rest of the run, at each such failure.
      most_failures: ends the run at the failure that follows so many.
    """

    rate: float = 0.1
    most_failures: int = 3

    def __post_init__(self) -> None:
        FACTOR("Rollback.rate", self.rate)
        COUNT("Rollback.most_failures", self.most_failures)


@dataclasses.dataclass
class Failure:
    """A step that failed, and the factors that it brings.

    Attributes:
      step: of the run, the first one 1; of one without memory, about.
      rate: of the learning rate.
      microbatches: of the number of microbatches.
    """

    step: int
    rate: float = 1.0
    microbatches: int = 1


class Rollbacks:
    """The failures of a run so far.

    Args:
      strategy: connected.
      path: of the file that stores them.
      policy: None ends the run at the first loss that is not finite.
      note: told once of each, by an event's name and a sentence.
      splits: whether batches are cut into more microbatches where memory is short; else the run ends.
    """

    def __init__(
        self,
        strategy: Strategy,
        path: str,
        policy: Rollback | None,
        note: Callable[[str, str], None],
        *,
        splits: bool = False,
    ) -> None:
        self._strategy, self._path, self._note = strategy, path, note
        self._policy = policy
        self._splits = splits
        self.has_gone_back = False  # in this process

        def read_stored() -> list[dict[str, Any]]:
            return [dataclasses.asdict(each) for each in load_record(path, list[Failure]) or []]

        failures = strategy.read_on_chief(read_stored, "The run's rollbacks cannot be read")
        self._failures = [Failure(**each) for each in failures]

    @property
    def rate(self) -> float:
        """The factor of the learning rate."""
        return math.prod(each.rate for each in self._failures)

    @property
    def microbatches(self) -> int:
        """The factor of the number of microbatches."""
        return math.prod(each.microbatches for each in self._failures)

    def check_start(self, start: Checkpoint | None) -> None:
        """Raises DivergedError where a run that goes back has no checkpoint: the weights are those that failed."""
        if self.has_gone_back and (start is None or not start.values):
            raise DivergedError(
                f"Training failed at step {self._failures[-1].step:,}, and there is no checkpoint to go back to."
            )

    def record(self, error: DivergedError | OutOfMemoryError) -> None:
        """Stores that a step failed, and says so; raises the error where the run is not to go back.

        A collective, unless one worker alone may have met the error: its process ends too, and the same command trains
        on.
        """
        is_memory = isinstance(error, OutOfMemoryError)
        if error.step is None or not (self._splits if is_memory else self._policy):
            raise error
        if is_memory:
            failure = Failure(error.step + 1, microbatches=MORE_MICROBATCHES)
            change = f"{self.microbatches * MORE_MICROBATCHES:,} times as many microbatches as at first"
        else:
            assert self._policy is not None
            failed = sum(each.microbatches == 1 for each in self._failures)
            if failed >= self._policy.most_failures:
                raise DivergedError(
                    f"{error} The run went back {failed} times, as train.on_divergence asks."
                ) from error
            failure = Failure(error.step, rate=self._policy.rate)
            change = f"{self.rate * self._policy.rate:g} times the learning rate that is set"
        self._failures.append(failure)
        what = re.split(r"\. (?=[A-Z])", str(error))[0].removesuffix(".")
        content = to_json(self._failures, indent=2) + "\n"
        if is_memory and self._strategy.topology.num_workers > 1:
            files.write_atomic(self._path, content)
            told = OutOfMemoryError(f"{what}. The same command trains on from the newest checkpoint, with {change}.")
            told.exit_status = EXIT_PEER_LOST
            raise told from error
        self._strategy.on_chief(
            lambda: files.write_atomic(self._path, content), "The run's rollbacks cannot be written"
        )
        self.has_gone_back = True
        event = "cuda_oom" if is_memory else "rolled_back"
        self._note(event, f"{what}. Going back to the newest checkpoint, with {change}.")
