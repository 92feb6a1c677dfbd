"""Columns of named data: inputs, targets, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import UserError, suggest

Names = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Columns:
    """Makes `(x, y)` or `(x, y, sample_weight)` out of columns by name.

    Args:
      inputs: one name, whose column is x; or several, then x is a dict of them.
      targets: the same for y.
      weights: the name of the sample weights' column; None weighs every example alike.
    """

    inputs: Names
    targets: Names
    weights: str | None = None

    @property
    def names(self) -> list[str]:
        """All names used, each once."""
        used = [*_as_list(self.inputs), *_as_list(self.targets), *([self.weights] if self.weights else [])]
        return list(dict.fromkeys(used))

    @property
    def input_names(self) -> list[str]:
        """The names of the inputs in a list."""
        return _as_list(self.inputs)

    def check(self, known: Sequence[str], where: str) -> None:
        """Raises UserError where `known`, what `where` holds, lacks one of the names."""
        for name in self.names:
            if name not in known:
                raise UserError(f"{where} has no column {name!r}; it has {sorted(known)}.{suggest(name, known)}")

    def select_inputs(self, columns: Mapping[str, Any]) -> Any:
        """The x of an example, or of a batch, from its columns."""
        return _select(columns, self.inputs)

    def select(self, columns: Mapping[str, Any]) -> tuple[Any, ...]:
        """The nest of an example, or of a batch, from its columns."""
        chosen = (_select(columns, self.inputs), _select(columns, self.targets))
        return (*chosen, columns[self.weights]) if self.weights else chosen


class Decoding:
    """Decodes named columns to the nest: per-column transforms, the choice of columns, the user's own transform."""

    def __init__(
        self,
        columns: Columns,
        transforms: Mapping[str, Callable[[Any], Any]] | None,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._columns = columns
        self._transforms = dict(transforms or {})
        self._transform = transform

    def check(self, known: Sequence[str], where: str) -> None:
        """Raises UserError where a column is not among those known."""
        self._columns.check(known, where)
        for name in self._transforms:
            Columns(inputs=name, targets=()).check(known, where)

    def __call__(self, columns: Mapping[str, Any]) -> Any:
        changed = {name: self._transforms[name](value) for name, value in columns.items() if name in self._transforms}
        nest = self._columns.select({**columns, **changed})
        return self._transform(nest) if self._transform is not None else nest


def _as_list(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _select(columns: Mapping[str, Any], names: Names) -> Any:
    return columns[names] if isinstance(names, str) else {name: columns[name] for name in names}
