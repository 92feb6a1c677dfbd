"""Goes back to the newest checkpoint where a step has failed, and trains on from there with other settings.

A step fails whose loss or gradients are not finite, or that finds no memory. The learning rate is lower then, or there
are more microbatches. The training is put together anew, as by another start: without a checkpoint it begins again.

Invariant: the other settings are stored before the run goes back, and every start reads them first. So a run that is
killed at any moment of it ends with the weights of one that was not, where both have checkpoints of the same steps. All
workers see the same loss, which was summed over them, and go back together; a lack of memory that one of them alone has
met ends its process, and the next start trains on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from tfdist.data.batches import BatchPlan
from tfdist.errors import EXIT_PEER_LOST, DivergedError, OutOfMemoryError, UserError
from tfdist.settings.checks import COUNT, Check
from tfdist.storage import files
from tfdist.strategies.strategy import Strategy
from tfdist.telemetry.events import EventLog
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import load_record

MORE_MICROBATCHES = 2
FACTOR = Check(
    "a factor between 0 and 1, such as 0.1",
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1,
)


@dataclasses.dataclass(frozen=True)
class Rollback:
    """The policy for a step that fails: short memory doubles the microbatches, and this follows on other failures.

    Attributes:
      rate: multiplies the learning rate for the rest of the run, at each loss or gradient that is not finite.
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
      policy: None ends the run at the first failure.
      events: told of each.

    Attributes:
      has_gone_back: in this process.
    """

    def __init__(self, strategy: Strategy, path: str, policy: Rollback | None, events: EventLog) -> None:
        self._strategy, self._path, self._events = strategy, path, events
        self.policy = policy
        self.has_gone_back = False

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

    def split(self, plan: BatchPlan) -> BatchPlan:
        """Returns the plan with the microbatches that the failures so far have brought.

        Raises:
          OutOfMemoryError: the batch has no examples for so many.
        """
        if self.microbatches == 1:
            return plan
        parts = plan.num_microbatches * self.microbatches
        with contextlib.suppress(UserError):
            if plan.num_parts is None:
                return dataclasses.replace(plan, num_microbatches=parts)
        raise OutOfMemoryError(
            f"A training step finds no memory, and global_batch_size = {plan.global_batch_size} cannot be cut into "
            f"{parts} microbatches. Take a smaller model, or a machine with more memory."
        )

    def describe(self) -> list[str]:
        """Says in sentences what the result of the run was reached with."""
        diverged = [each.step for each in self._failures if each.rate < 1]
        short = [each.step for each in self._failures if each.microbatches > 1]
        rate = f"{self.rate:g} times the learning rate that is set: the loss or a gradient was not finite"
        parts = f"{self.microbatches:,} times as many microbatches as are set: memory was short"
        cases: Sequence[tuple[str, list[int]]] = ((rate, diverged), (parts, short))
        return [
            f"The result was reached with {what} at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}."
            for what, steps in cases
            if steps
        ]

    def record(self, error: DivergedError | OutOfMemoryError) -> None:
        """Stores that a step failed, and says so; raises the error where the run is not to go back.

        A collective, unless one worker alone may have met the error: its process ends too, and the same command trains
        on.
        """
        is_memory = isinstance(error, OutOfMemoryError)
        if error.step is None or self.policy is None or (isinstance(error, DivergedError) and error.is_by_callback):
            raise error
        if isinstance(error, OutOfMemoryError) and error.tries_xla:  # which the next attempt does not
            failure, change = Failure(error.step + 1), "XLA off"
        elif is_memory:
            failure = Failure(error.step + 1, microbatches=MORE_MICROBATCHES)
            change = f"{self.microbatches * MORE_MICROBATCHES:,} times as many microbatches as are set"
        else:
            failed = sum(each.rate < 1 for each in self._failures)
            if failed >= self.policy.most_failures:
                raise DivergedError(f"{error} The run went back {failed} times, as train.recovery says.") from error
            failure = Failure(error.step, rate=self.policy.rate)
            change = f"{self.rate * self.policy.rate:g} times the learning rate that is set"
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
        message = f"{what}. Going back to the newest checkpoint, or the start, with {change}."
        self._events.warning("cuda_oom" if is_memory else "rolled_back", message=message)
