"""Another run's variables by the names that this model has for them, for a run that begins with its weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from tfdist.checkpoint.state import State
from tfdist.errors import UserError
from tfdist.training.step.state import MODEL

MOST_SHOWN = 20


def are_names(value: object) -> bool:
    """Whether it maps regular expressions to what `re.sub` takes."""
    if not isinstance(value, Mapping) or not value:
        return False
    try:
        return all(isinstance(there, str) and re.compile(here) for here, there in value.items())
    except (re.error, TypeError):
        return False


def renamed(state: State, own: Iterable[str], names: Mapping[str, str] | None) -> State:
    """The state with the model's variables under the names in `own`.

    Args:
      state: of a checkpoint.
      own: names of this program's variables; those of its model begin with `MODEL`.
      names: by a regular expression that names of this model's variables match, "encoder/(.*)", what they are called
        in the state, "backbone/\\1". The first that matches counts; what none matches keeps its name.

    Raises:
      UserError: an expression matches no variable of the model, or names none of the state's.
    """
    if not names:
        return state
    ours = [name.removeprefix(MODEL) for name in own if name.startswith(MODEL)]
    theirs = {name.removeprefix(MODEL): array for name, array in state.tensors.items() if name.startswith(MODEL)}
    found, taken, matched = {}, set(), set()
    for name in ours:
        there = name
        for pattern, target in names.items():
            if (match := re.fullmatch(pattern, name)) is not None:
                there = match.expand(target)
                matched.add(pattern)
                taken.add(there)
                break
        if there in theirs:
            found[name] = theirs[there]
        elif there in taken:
            raise UserError(
                f"train.start_from_names calls {name!r} {there!r}, which is not there. There are {_some(theirs)}."
            )
    idle = [pattern for pattern in names if pattern not in matched]
    if idle:
        raise UserError(
            f"train.start_from_names has {idle[0]!r}, which no variable of the model matches. There are {_some(ours)}."
        )
    kept = {name: array for name, array in theirs.items() if name not in taken and name not in found}
    rest = {name: array for name, array in state.tensors.items() if not name.startswith(MODEL)}
    tensors = {f"{MODEL}{name}": array for name, array in (found | kept).items()}
    return dataclasses.replace(state, tensors=rest | tensors)


def _some(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - MOST_SHOWN:,} more" if len(known) > MOST_SHOWN else ""
    return ", ".join(known[:MOST_SHOWN]) + more
