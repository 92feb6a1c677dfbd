"""Goes back to the newest checkpoint where a loss or gradient is not finite, and on from there in another way.

Invariant: what is done in another way is stored before the run goes back, and every start reads it first. So a run that
is killed at any moment of it ends with the weights of one that was not. All workers see the same step fail, since what
they test was summed over them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import keras

from tfdist.errors import DivergedError, UserError, is_whole_number
from tfdist.recipes.groups import scale_rate
from tfdist.settings.checks import shown
from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.telemetry.json_text import to_json
from tfdist.training.recovery.recovery import Position
from tfdist.training.step.optimizer import parts


@dataclasses.dataclass(frozen=True)
class Rollback:
    """What a run does in another way once it has gone back.

    Attributes:
      skip_steps: leaves so many batches out, the last of them the one whose step failed.
      rate: multiplies the learning rate from the checkpoint on, for the rest of the run.
      most_failures: ends the run at the failure that follows so many without a checkpoint in between.
    """

    skip_steps: int = 1
    rate: float = 1.0
    most_failures: int = 3

    def __post_init__(self) -> None:
        if not is_whole_number(self.skip_steps, least=0):
            raise UserError(f"Rollback.skip_steps is {shown(self.skip_steps)}; write a whole number from 0.")
        if not isinstance(self.rate, int | float) or isinstance(self.rate, bool) or not 0 < self.rate <= 1:
            raise UserError(f"Rollback.rate is {shown(self.rate)}; write a factor above 0, up to 1, such as 0.1.")
        if not is_whole_number(self.most_failures):
            raise UserError(
                f"Rollback.most_failures is {shown(self.most_failures)}; write a whole number of at least 1."
            )
        if self.skip_steps == 0 and self.rate == 1:
            raise UserError(
                "A Rollback with skip_steps = 0 and rate = 1.0 would do the same again."
                " Write skip_steps = 1, or rate = 0.1."
            )


@dataclasses.dataclass
class Failure:
    """A step that failed.

    Attributes:
      step: of the run, the first one 1.
      back_to: the step of the checkpoint that the run went back to; None before it did.
      iterations: the optimizer's count there.
      skip_steps, rate: of the policy at that time.
    """

    step: int
    skip_steps: int
    rate: float
    back_to: int | None = None
    iterations: int = 0


class Rollbacks:
    """The failures of a run so far.

    Args:
      strategy: connected.
      path: of the file that stores them.
      policy: None ends the run at the first.
      note: told once of each, by an event's name and a sentence.
    """

    def __init__(
        self, strategy: Strategy, path: str, policy: Rollback | None, note: Callable[[str, str], None]
    ) -> None:
        self._strategy, self._path, self._note = strategy, path, note
        self._policy = policy
        self._failures: list[Failure] = []
        self.has_gone_back = False  # in this process
        self._read()

    @property
    def is_possible(self) -> bool:
        """Whether the run goes back; it is then saved before its first step, to have where to go."""
        return self._policy is not None

    @property
    def skipped(self) -> frozenset[int]:
        """The steps that are left out, as the number of steps done before each."""
        return frozenset(
            step for each in self._failures for step in range(max(0, each.step - each.skip_steps), each.step)
        )

    def apply(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Multiplies the optimizer's rate by what the failures so far say; before a step is traced."""
        factors = [(each.iterations, each.rate) for each in self._failures if each.rate != 1]
        if factors:
            for one in parts(optimizer):
                scale_rate(one, factors)

    def arrived(self, start: Position | None, optimizer: keras.optimizers.Optimizer) -> bool:
        """Notes where the run is back, if it is; whether that changes the optimizer's rate. A collective.

        Raises:
          DivergedError: no checkpoint is left, and the weights are not finite.
        """
        if not self._failures or self._failures[-1].back_to is not None:
            return False
        failure = self._failures[-1]
        if start is None or not start.values:
            raise DivergedError(f"Training diverged at step {failure.step}, and there is no checkpoint to go back to.")
        failure.back_to = start.step
        failure.iterations = int(keras.ops.convert_to_numpy(parts(optimizer)[0].iterations))
        self._write()
        self.apply(optimizer)
        return failure.rate != 1

    def note(self, error: DivergedError) -> None:
        """Stores that a step failed, and says so; raises the error where the run is not to go back."""
        if self._policy is None or error.step is None:
            raise error
        policy, before = self._policy, self._failures
        places = [each.back_to for each in before]
        if len(before) >= policy.most_failures and len(set(places[-policy.most_failures :])) == 1:
            raise DivergedError(
                f"{error} The run went back to step {places[-1]:,} {policy.most_failures} times, as "
                "train.on_divergence asks, and came to no checkpoint after it."
            ) from error
        before.append(Failure(error.step, policy.skip_steps, policy.rate))
        self._write()
        self.has_gone_back = True
        done = [
            *([f"leaving out the batches of {policy.skip_steps:,} steps up to it"] if policy.skip_steps else []),
            *([f"multiplying the learning rate by {policy.rate:g}"] if policy.rate != 1 else []),
        ]
        self._note(
            "rolled_back",
            f"The loss or a gradient of step {error.step:,} is not finite: going back to the newest checkpoint, "
            f"{' and '.join(done)}.",
        )

    def _read(self) -> None:
        """The failures that earlier starts stored. A collective."""

        def stored() -> str:
            return files.read(self._path).decode() if files.exists(self._path) else "[]"

        text = self._strategy.on_chief(stored, "The run's rollbacks cannot be read")
        shared = self._strategy.broadcast(None if text is None else text.encode())
        self._failures = [Failure(**each) for each in json.loads(bytes(shared))]

    def _write(self) -> None:
        """Stores the failures. A collective, after which every worker may rely on it."""
        content: Sequence[dict[str, object]] = [dataclasses.asdict(each) for each in self._failures]
        self._strategy.on_chief(
            lambda: files.write_atomic(self._path, to_json(content, indent=2) + "\n"),
            "The run's rollbacks cannot be written",
        )
