"""Settings as objects: what is declared once is what is checked, said, written down and compared on resume."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import settings_page
from support import REPOSITORY

from tfdist.errors import UserError
from tfdist.settings.checks import COUNT, FUNCTION, SECONDS, SEED, SWITCH, one_of, or_none, text
from tfdist.settings.declaration import Settings, setting
from tfdist.training.run.claim import select_fixed_settings
from tfdist.training.run.train_settings import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Settings):
    """A part."""

    NAME: ClassVar[str] = "part"

    size: int = setting("how many", COUNT, unit="bytes")
    mode: str = setting("which way", one_of("fast", "slow"), "fast", may_change=True)


class Callable_:
    def __call__(self, needed: int) -> None: ...


@pytest.mark.parametrize(
    ("check", "good", "bad", "said"),
    [
        (COUNT, [1, 10**9], [0, -1, True, 1.0, "1", None, [1]], "write a whole number of at least 1."),
        (COUNT, [10**12], [10**12 + 1, 10**30], "at least 1. The most is 1,000,000,000,000."),
        (or_none(COUNT), [None, 1], [0], "write a whole number of at least 1, or None."),
        (SEED, [0, 2**32 - 1], [-1, 2**32], "write a whole number from 0 to 4294967295."),
        (SECONDS, [0.5, 3], [0, -1.0, float("inf"), float("nan"), True, "1"], "write a number of seconds above 0."),
        (SWITCH, [True, False], [1, "True", None], "write True or False."),
        (one_of("a", "b"), ["a"], ["c", None, []], "write one of 'a', 'b'."),
        (text("val_loss"), ["x"], ["", "  ", 3], "write a text, such as 'val_loss'."),
        (FUNCTION, [len, Part, lambda: 1], [3, Callable_()], "write a function, @my_module.my_function without"),
    ],
)
def test_a_check_takes_what_can_be_used_and_says_what_to_write(check, good, bad, said) -> None:
    for value in good:
        check("part.size", value)
    for value in bad:
        with pytest.raises(UserError) as refused:
            check("part.size", value)
        assert str(refused.value).startswith("part.size is ") and said in str(refused.value)


def test_what_may_change_on_resume_is_what_is_declared_so() -> None:
    assert Part.changeable() == ["part.mode"]
    settings = {f"train.{name}": "1" for name in TrainSettings.declarations()}
    kept = select_fixed_settings(settings)
    assert set(settings) - set(kept) == set(TrainSettings.changeable())
    assert "train.seed" in kept and "train.epochs" not in kept


@pytest.mark.slow
def test_the_page_of_all_settings_is_what_they_declare() -> None:
    page = settings_page.PAGE.read_text()
    assert settings_page.render_page() == page, "run: python tools/settings_page.py"
    assert (REPOSITORY / "docs" / "configuration.md").samefile(settings_page.PAGE)
    for part in settings_page.PARTS:
        assert all(f"| `{name}` |" in page for name in part.declarations())
