"""What tells a run of a sweep from its other runs, as it travels from the chief to a worker.

Invariant: what travels is values, never gin text. The side that starts the run makes the statements itself, from values
that its own space allows, so a message can name no function and import no module. `chief.py` and `remote_worker.py` use
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist.telemetry.json_text import to_json
from tfdist.tuning.search.space import Space


@dataclasses.dataclass(frozen=True)
class TrialSettings:
    """The settings of one run.

    Attributes:
      values: by binding path, or by name where the model asks for them.
      seed: `train.seed`.
      stop_after_epochs: of a rung that ends before the training does; else None.
    """

    values: Mapping[str, Any]
    seed: int
    stop_after_epochs: int | None = None

    def statements(self, space: Space, *, seed: int) -> list[str]:
        """The gin statements that give a configuration, whose own `train.seed` is `seed`, these settings."""
        made = space.statements(self.values)
        if self.seed != seed:
            made.append(f"train.seed = {self.seed}")
        if self.stop_after_epochs is not None:
            made.append(f"train.stop_after_epochs = {self.stop_after_epochs}")
        return made

    def to_message(self) -> dict[str, Any]:
        """The fields of a message, for `from_message`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> TrialSettings:
        """Those of a message that `wire.decode` has checked; the values as JSON has them."""
        return cls(message["values"], message["seed"], message["stop_after_epochs"])

    def checked(self, space: Space) -> TrialSettings:
        """The same with the values as `space` has them; raises UserError for what is no value of it."""
        return dataclasses.replace(self, values=space.received(self.values))

    def equals(self, other: TrialSettings) -> bool:
        """Whether both are the same once they are JSON."""
        return to_json(self.to_message()) == to_json(other.to_message())
