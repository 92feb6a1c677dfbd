"""What earlier sweeps found out, for the oracle of a new one.

Invariant: a trial is known only if its values lie in the new space and all that the new space asks for is among them;
of any other it is said why. The journal of the new sweep keeps what is known, so that a later start does not depend on
the earlier sweeps' files.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import UserError
from tfdist.tuning.schedule.history import Sweep, Trial, read_sweep
from tfdist.tuning.search.objective import Objective
from tfdist.tuning.search.space import Space

MOST_REASONS = 5


@dataclasses.dataclass(frozen=True)
class Known:
    """A finished trial of an earlier sweep.

    Attributes:
      trial: where it comes from, RUN_DIR/trials/NAME.
      values: by path or name.
      curve: epoch and objective of each of its evaluations.
    """

    trial: str
    values: Mapping[str, Any]
    objective: float
    curve: Sequence[Sequence[float]] = ()


def read_known(
    directories: Sequence[str], space: Space, objective: Objective, tell: Callable[[str], None]
) -> list[Known]:
    """The finished trials of sweeps that can be compared with those to come.

    Args:
      directories: of the earlier sweeps.
      space: of the new one.
      objective: of the new one.
      tell: takes a line about each of the sweeps: how many of its trials are known, and why others are not.

    Raises:
      UserError: there is no sweep, it had another objective, or none of its trials lies in the space.
    """
    known: list[Known] = []
    for directory in directories:
        sweep = read_sweep(directory)
        _check_objective(sweep, directory, objective)
        reasons: collections.Counter[str] = collections.Counter()
        taken = []
        for trial in sweep.trials:
            if reason := _why_not(trial, space):
                reasons[reason] += 1
                continue
            curve = [(point.epoch, point.objective) for point in trial.curve]
            values = space.restored(trial.values)
            taken.append(Known(f"{directory}/trials/{trial.name}", values, float(trial.objective or 0.0), curve))
        left_out = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(MOST_REASONS))
        if not taken:
            raise UserError(
                f"tune.warm_start: no trial of {directory} can be known here: {left_out or 'it has none'}. Remove it, "
                "or let tune.space be such that these trials lie in it."
            )
        left_out = f"; left out: {left_out}" if left_out else ""
        best = min(taken, key=lambda each: objective.cost(each.objective))
        tell(
            f"{directory}: {len(taken)} of {len(sweep.trials)} trials are known, the best with {objective.name} "
            f"{best.objective:.4f}{left_out}"
        )
        known += taken
    return known


def _check_objective(sweep: Sweep, directory: str, objective: Objective) -> None:
    theirs = f"{sweep.direction} {sweep.objective}"
    ours = f"{objective.direction} {objective.name}"
    if theirs != ours:
        raise UserError(
            f"tune.warm_start: the sweep in {directory} was for {theirs}, this one is for {ours}. Its objectives say "
            "nothing here: remove it from tune.warm_start."
        )


def _why_not(trial: Trial, space: Space) -> str:
    """Why a trial cannot be known; empty where it can."""
    if trial.status != "done" or trial.objective is None:
        return f"{trial.status}, not trained to its end"
    return space.why_outside(trial.values)
