"""Lengths of a training in the units that people think in: '500 steps', '5 epochs', '64_000 examples', '0.06 of run'.

Invariant: a length is checked when it is read, and becomes a number of steps once the run is known; the same settings
give the same number on every strategy.
"""

from __future__ import annotations

import dataclasses
import re

from tfdist.errors import UserError, is_whole_number

_TEXT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?|\.\d+)\s*(steps?|epochs?|examples?|of run)\s*")
_WAYS = "'500 steps', '5 epochs', '64_000 examples', '0.06 of run', or a number of steps"


@dataclasses.dataclass(frozen=True)
class RunLength:
    """The length of a run.

    Attributes:
      total_steps: of all of it.
      steps_per_epoch: of an epoch: one pass over the examples, or as many as are to count as one.
      examples_per_epoch: of so many steps on average.
      global_batch_size: examples of a step.
    """

    total_steps: int
    steps_per_epoch: int
    examples_per_epoch: float
    global_batch_size: int


@dataclasses.dataclass(frozen=True)
class Length:
    """A length in steps, epochs or shares of a run.

    Attributes:
      amount: of the unit.
      unit: "steps", "epochs", "examples" or "of run".
    """

    amount: float
    unit: str

    def steps(self, run: RunLength) -> int:
        """Rounds the length to steps; at least 1 unless the length is 0."""
        steps_each = {
            "steps": 1.0,
            "epochs": run.steps_per_epoch,
            "examples": run.steps_per_epoch / run.examples_per_epoch,
            "of run": run.total_steps,
        }[self.unit]
        return max(round(self.amount * steps_each), 1 if self.amount > 0 else 0)


def is_length(value: object) -> bool:
    """True where a setting's value is a length."""
    try:
        parse_length("", value)
    except UserError:
        return False
    return True


def parse_length(setting: str, value: object) -> Length:
    """The length that a setting's value says.

    Raises:
      UserError: it says none.
    """
    if is_whole_number(value, least=0):
        return Length(float(value), "steps")
    if isinstance(value, str) and (found := _TEXT.fullmatch(value)):
        amount, unit = float(found[1].replace("_", "")), found[2]
        length = Length(amount, unit if unit == "of run" else unit.rstrip("s") + "s")
        if length.unit == "of run" and amount > 1:
            raise UserError(
                f"{setting} is {value!r}; a share of the run is from 0 to 1: write '{amount / 100:g} of run'."
            )
        if length.unit in ("steps", "examples") and amount != int(amount):
            raise UserError(f"{setting} is {value!r}; write a whole number of {length.unit}.")
        return length
    raise UserError(f"{setting} is {value!r}; write {_WAYS}.")
