"""Goes back to the newest checkpoint where a step has failed, and on from there in another way.

A step fails whose loss or gradients are not finite, whose loss is a spike, whose batch cannot be read, or that finds no
memory.

Invariant: what is done in another way is stored before the run goes back, and every start reads it first. So a run that
is killed at any moment of it ends with the weights of one that was not, where both have checkpoints of the same steps:
which one it goes back to says from where the rate is another, and which of the left-out batches stay trained on. All
workers see the same loss, which was summed over them, and go back together; what one of them alone has seen ends its
process, and the next start goes on.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import (
    EXIT_PEER_LOST,
    DivergedError,
    OutOfMemoryError,
    UnreadableError,
    UserError,
    is_whole_number,
)
from tfdist.recipes.groups import scale_rate
from tfdist.settings.checks import shown
from tfdist.storage import files
from tfdist.strategies.base import Strategy
from tfdist.telemetry.json_text import to_json
from tfdist.telemetry.records import load_record
from tfdist.training.recovery.recovery import Opened
from tfdist.training.step.divergence import Spike
from tfdist.training.step.optimizer import parts

StepError = DivergedError | OutOfMemoryError | UnreadableError


@dataclasses.dataclass(frozen=True)
class Rollback:
    """What a run does in another way once it has gone back.

    Attributes:
      skip_steps: leaves so many batches out, the last of them the one whose step failed.
      rate: multiplies the learning rate from the checkpoint on, for the rest of the run.
      most_failures: ends the run at the failure that follows so many without a checkpoint in between.
      spike: takes a loss for a failure too whose robust z-score, (loss - median) ÷ (1.4826 · median absolute
        deviation) of the steps before it, is above this; None takes none. PaLM's authors did so by hand (Chowdhery et
        al., 2022).
      window: how many steps before it a spike is compared with.
    """

    skip_steps: int = 1
    rate: float = 1.0
    most_failures: int = 3
    spike: float | None = None
    window: int = 64

    def __post_init__(self) -> None:
        if not is_whole_number(self.skip_steps, least=0):
            raise UserError(f"Rollback.skip_steps is {shown(self.skip_steps)}; write a whole number from 0.")
        if not isinstance(self.rate, int | float) or isinstance(self.rate, bool) or not 0 < self.rate <= 1:
            raise UserError(f"Rollback.rate is {shown(self.rate)}; write a factor above 0, up to 1, such as 0.1.")
        if not is_whole_number(self.most_failures):
            raise UserError(
                f"Rollback.most_failures is {shown(self.most_failures)}; write a whole number of at least 1."
            )
        if self.spike is not None and (
            not isinstance(self.spike, int | float) or isinstance(self.spike, bool) or not self.spike > 0
        ):
            raise UserError(f"Rollback.spike is {shown(self.spike)}; write a z-score above 0, such as 10.0, or None.")
        if not is_whole_number(self.window, least=4):
            raise UserError(f"Rollback.window is {shown(self.window)}; write a whole number from 4.")
        if self.skip_steps == 0 and self.rate == 1:
            raise UserError(
                "A Rollback with skip_steps = 0 and rate = 1.0 would do the same again."
                " Write skip_steps = 1, or rate = 0.1."
            )

    @property
    def spikes(self) -> Spike | None:
        """What the step looks for."""
        return None if self.spike is None else Spike(float(self.spike), self.window)


@dataclasses.dataclass
class Failure:
    """A step that failed.

    Attributes:
      step: of the run, the first one 1; of one without memory, about.
      microbatches: from there on there are so many times as many.
      back_to: the step of the checkpoint that the run went back to; None before it did.
      iterations: the optimizer's count there.
      skip_steps, rate: of the policy at that time.
    """

    step: int
    skip_steps: int
    rate: float
    microbatches: int = 1
    back_to: int | None = None
    iterations: int = 0


class Rollbacks:
    """The failures of a run so far.

    Args:
      strategy: connected.
      path: of the file that stores them.
      policy: None ends the run at the first loss that is not finite.
      splits: whether batches are cut into more microbatches where memory is short; else the run ends.
      note: told once of each, by an event's name and a sentence.
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
        self._failures: list[Failure] = []
        self.has_gone_back = False  # in this process
        self._read()

    @property
    def is_possible(self) -> bool:
        """Whether the run goes back; it is then saved before its first step, to have where to go."""
        return self._policy is not None or self._splits

    @property
    def spike(self) -> Spike | None:
        """What the steps look for."""
        return None if self._policy is None else self._policy.spikes

    @property
    def microbatches(self) -> int:
        """How many times as many microbatches there are as at the beginning."""
        return math.prod(each.microbatches for each in self._failures)

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

    def arrived(self, opened: Opened, optimizer: keras.optimizers.Optimizer) -> bool:
        """Notes where the run is back, if it is; whether that changes the optimizer's rate. A collective.

        Raises:
          DivergedError: no checkpoint is left, and the weights are not those of the beginning.
        """
        if not self._failures or self._failures[-1].back_to is not None:
            return False
        failure, start = self._failures[-1], opened.start
        if opened.checkpoint is not None:
            opened.checkpoint.restore(again=True)
        updates = int(keras.ops.convert_to_numpy(parts(optimizer)[0].iterations))
        if (start is None or not start.values) and updates > 0:
            raise DivergedError(f"Training failed at step {failure.step}, and there is no checkpoint to go back to.")
        failure.back_to = 0 if start is None else start.step
        failure.iterations = updates
        self._write()
        self.apply(optimizer)
        return failure.rate != 1

    def note(
        self, error: StepError, *, found: Callable[[UnreadableError], UnreadableError] = lambda error: error
    ) -> None:
        """Stores that a step failed, and says so; raises the error where the run is not to go back.

        Where another worker may not know of it, this process ends too, and the same command goes on.

        Args:
          error: with its step.
          found: the error of the one step whose batch cannot be read, from that of several steps.
        """
        if error.step is None or not (self._splits if isinstance(error, OutOfMemoryError) else self._policy):
            raise error
        if isinstance(error, UnreadableError):
            error = found(error)
        failure, otherwise = self._failure(error)
        if not isinstance(error, OutOfMemoryError):
            self._check_account(error)
        self._failures.append(failure)
        what = re.split(r"\. (?=[A-Z])", str(error))[0].removesuffix(".")
        if not isinstance(error, DivergedError) and self._strategy.topology.num_workers > 1:
            files.write_atomic(self._path, self._content())
            told = type(error)(f"{what}. The same command goes on from the newest checkpoint, {otherwise}.")
            told.exit_status = EXIT_PEER_LOST
            raise told from error
        self._write()
        self.has_gone_back = True
        event = "split" if isinstance(error, OutOfMemoryError) else "rolled_back"
        self._note(event, f"{what}. Going back to the newest checkpoint, {otherwise}.")

    def _failure(self, error: StepError) -> tuple[Failure, str]:
        """A failure, and in words what is done in another way for it."""
        assert error.step is not None
        if isinstance(error, OutOfMemoryError):
            times = 2 * self.microbatches
            words = f"with batches cut into {times:,} times as many microbatches as at first"
            return Failure(error.step + 1, skip_steps=0, rate=1.0, microbatches=2), words
        if isinstance(error, UnreadableError):
            step = error.step + 1
            return Failure(step, skip_steps=1, rate=1.0), f"leaving out the batch of step {step:,}"
        policy = self._policy
        assert policy is not None
        done = [
            *([f"leaving out the batches of {policy.skip_steps:,} steps up to it"] if policy.skip_steps else []),
            *([f"multiplying the learning rate by {policy.rate:g}"] if policy.rate != 1 else []),
        ]
        return Failure(error.step, policy.skip_steps, policy.rate), " and ".join(done)

    def _check_account(self, error: StepError) -> None:
        """Raises the error that ends a run which fails again and again without coming further."""
        assert self._policy is not None
        most = self._policy.most_failures
        places = [each.back_to for each in self._failures if each.microbatches == 1]
        if len(places) >= most and len(set(places[-most:])) == 1:
            raise DivergedError(
                f"{error} The run went back to step {places[-1]:,} {most} times, as train.on_divergence asks, and came "
                "to no checkpoint after it."
            ) from error

    def _read(self) -> None:
        """The failures that earlier starts stored. A collective."""

        def stored() -> list[dict[str, Any]]:
            failures = load_record(self._path, list[Failure]) or []
            return [dataclasses.asdict(each) for each in failures]

        failures = self._strategy.read_on_chief(stored, "The run's rollbacks cannot be read")
        self._failures = [Failure(**each) for each in failures]

    def _write(self) -> None:
        """Stores the failures. A collective, after which every worker may rely on it."""
        self._strategy.on_chief(
            lambda: files.write_atomic(self._path, self._content()), "The run's rollbacks cannot be written"
        )

    def _content(self) -> str:
        return to_json(self._failures, indent=2) + "\n"
