"""The steps that the flag `--profile` names.

Invariant: imports no TensorFlow, so that a wrong flag is told at once. `main.py` parses it, `profiler.py` follows it.
"""

from __future__ import annotations

import dataclasses
import re

from tfdist.errors import UserError

_RIGHT = "Write --profile='steps 100-110', from 1 and with the last step included, or --profile='step 100'."


@dataclasses.dataclass(frozen=True)
class ProfiledSteps:
    """Steps of a run, counted from 1; `last` is one of them."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> ProfiledSteps:
        """Raises UserError for what is not "steps A-B" or "step A"."""
        found = re.fullmatch(r"\s*steps?\s+(\d+)(?:\s*-\s*(\d+))?\s*", text)
        if found is None:
            raise UserError(f"--profile={text!r} names no steps. {_RIGHT}")
        first = int(found[1])
        last = int(found[2] or first)
        if not 1 <= first <= last:
            raise UserError(f"--profile={text!r}: there are no steps {first} to {last}. {_RIGHT}")
        return cls(first, last)

    def check(self, total_steps: int) -> None:
        """Raises UserError where a run of so many steps does not have them all."""
        if self.last > total_steps:
            raise UserError(
                f"--profile asks for the steps {self.first} to {self.last}, and this run has {total_steps:,} steps. "
                "Name steps that it has, or let it train longer."
            )

    def next_edge(self, step: int) -> int | None:
        """Where a call that begins after `step` has to end at the latest, so that these steps are whole calls."""
        return next((edge for edge in (self.first - 1, self.last) if step < edge), None)
