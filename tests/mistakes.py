"""Tables of mistakes: what is wrong, and what its one message says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from tfdist.errors import UserError


def each_is_refused(act: Callable[..., Any], *rows: tuple[Any, ...]) -> Callable[..., None]:
    """A test of each row: `act` of what is wrong raises a UserError that holds the words, or a match of them.

    Args:
      act: takes what is wrong, and the fixtures that its other parameters name.
      rows: what is wrong, and the words.
    """
    fixtures = list(inspect.signature(act).parameters)[len(rows[0]) - 1 :]

    @pytest.mark.parametrize("row", rows, ids=lambda row: str(row[-1])[:60])
    def test(request: pytest.FixtureRequest, row: tuple[Any, ...]) -> None:
        *wrong, words = row
        with pytest.raises(UserError) as refused:
            act(*wrong, *map(request.getfixturevalue, fixtures))
        told = str(refused.value)
        assert words in told or re.search(words, told, re.DOTALL), told

    return test


def call(make: Callable[[], Any]) -> Any:
    """For tables whose rows make the mistake themselves."""
    return make()
