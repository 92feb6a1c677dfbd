"""Settings as objects: a part of the training declares what can be set about it, once.

A declaration gives a setting's type, default, check, unit and meaning, and whether it may change when a run resumes.
From it come the check and its message, the names that gin files may use, the page of all settings and what a run
directory is known by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from tfdist.settings.checks import Check

_KEY = "setting"


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Metadata of a setting, beside its type and default.

    Attributes:
      meaning: in a line, for the page of all settings.
      check: of its value.
      unit: of a number; empty where it has none.
      may_change: whether a run that resumes may have another value than it began with.
    """

    meaning: str
    check: Check
    unit: str
    may_change: bool


def setting(
    meaning: str,
    check: Check,
    default: Any = dataclasses.MISSING,
    *,
    make_default: Callable[[], Any] | None = None,
    unit: str = "",
    may_change: bool = False,
) -> Any:
    """Declares a field of `Settings`; without a default, or what makes one, it needs a value."""
    metadata = {_KEY: Declaration(meaning, check, unit, may_change)}
    if make_default is not None:
        return dataclasses.field(default_factory=make_default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def format_default(field: dataclasses.Field[Any]) -> str | None:
    """A setting's default as a gin file writes it; None where it needs a value."""
    if callable(field.default_factory):
        make: Any = field.default_factory
        return f"@{make.__module__.rpartition('.')[2]}.{make.__name__}()"
    return None if field.default is dataclasses.MISSING else repr(field.default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a part of the training.

    Attributes:
      NAME: what gin files call it.

    Raises:
      UserError: a value fails its check.
    """

    NAME: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, declared in self.declarations().items():
            declared.check(f"{self.NAME}.{name}", getattr(self, name))

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """Returns the declaration of each setting, by its name."""
        return {field.name: field.metadata[_KEY] for field in dataclasses.fields(cls)}

    @classmethod
    def changeable(cls) -> list[str]:
        """The full names of the settings that may change when a run resumes."""
        return [f"{cls.NAME}.{name}" for name, declared in cls.declarations().items() if declared.may_change]
