"""The sets of examples that a training is evaluated on.

The first set's metrics have plain names (`val_loss`), those of another set its name before theirs (`val_ood_loss`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.data.sources.source import Source
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.data.transforms.mapped import FirstExamples
from tfdist.errors import UserError
from tfdist.settings.checks import COUNT, FUNCTION, Check, or_none

NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
SET_NAME = Check("a letter, then letters, digits, _", lambda name: isinstance(name, str) and bool(NAME.fullmatch(name)))


@dataclasses.dataclass(frozen=True)
class EvalSet:
    """A set of examples with a batch size or a number of batches of its own.

    Args:
      data: returns the examples.
      batch_size: of one evaluation step; None takes `train.eval_batch_size`.
      num_batches: of an evaluation, from the set's first; None takes all.

    Raises:
      UserError: one of them is of another type.
    """

    data: Callable[[], Any]
    batch_size: int | None = None
    num_batches: int | None = None

    def __post_init__(self) -> None:
        FUNCTION("EvalSet.data", self.data)
        or_none(COUNT)("EvalSet.batch_size", self.batch_size)
        or_none(COUNT)("EvalSet.num_batches", self.num_batches)

    def take_batches(self, source: Source, batch_size: int, split: str) -> Source:
        """The examples of the set's batches; raises UserError for a stream of which some are wanted."""
        if self.num_batches is None:
            return source
        if isinstance(source, StreamSource):
            raise UserError(
                f"The {split} data is a stream, of which num_batches cannot be taken. Return "
                f"dataset.take({self.num_batches * batch_size}) from its data function."
            )
        return FirstExamples(source, self.num_batches * batch_size)


def list_eval_sets(eval_data: Any, batch_size: int) -> dict[str, tuple[EvalSet, int]]:
    """The sets and the examples of their steps by name; the only one, where it has none, by an empty name."""
    sets = {name: each if isinstance(each, EvalSet) else EvalSet(each) for name, each in _name_sets(eval_data).items()}
    return {name: (each, each.batch_size or batch_size) for name, each in sets.items()}


def first_function(eval_data: Any) -> Callable[[], Any]:
    """The data function of the only set, or of the first."""
    return next(iter(list_eval_sets(eval_data, 1).values()))[0].data


def name_split(name: str) -> str:
    """What messages call a set of this name."""
    return f"evaluation ({name})" if name else "evaluation"


def prefix_results(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is known of each set by its metrics' names, as it is reported; `results`: by set, the first one first."""
    first, *others = results
    named = [(f"{name}_{metric}", value) for name in others for metric, value in results[name].items()]
    return {**results[first], **dict(named)}


def _name_sets(eval_data: Any) -> Mapping[Any, Any]:
    return eval_data if isinstance(eval_data, Mapping) else {} if eval_data is None else {"": eval_data}


def _are_sets(value: Any) -> bool:
    sets = _name_sets(value)
    are_named = sets is not value or all(map(SET_NAME.accepts, sets))
    return bool(sets) and are_named and all(isinstance(e, EvalSet) or FUNCTION.accepts(e) for e in sets.values())


EVAL_DATA = Check(
    "a function, @my_module.my_function without parentheses; or several by name, {'test': @my_module.test}",
    _are_sets,
    hint=lambda value: " Names are of letters and digits." if isinstance(value, Mapping) else FUNCTION.hint(value),
)
