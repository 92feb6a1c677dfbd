"""The page of all settings: a table for each part, made of what it declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tfdist.settings.declaration import Settings

REQUIRED = "required"


def text(parts: Iterable[type[Settings]]) -> str:
    """The tables in Markdown, each under the name that gin files use."""
    return "\n".join(f"### `{part.NAME}`\n\n{_summary(part)}\n\n{table(part)}" for part in parts)


def table(part: type[Settings]) -> str:
    """A row for each setting: required ones first, the others as they are declared."""
    declared = part.declared()
    resumes = any(about.may_change for about in declared.values())
    columns = ["setting", "default", "value", *(["on resume"] if resumes else []), "meaning"]
    fields = sorted(dataclasses.fields(part), key=lambda field: field.default is not dataclasses.MISSING)
    rows = [columns, ["---"] * len(columns)]
    for field in fields:
        about = declared[field.name]
        default = REQUIRED if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        value = about.check.wanted + (f" ({about.unit})" if about.unit else "")
        may_change = ["may change" if about.may_change else ""] if resumes else []
        rows.append([f"`{field.name}`", default, value, *may_change, about.meaning])
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def _summary(part: type[Settings]) -> str:
    return (part.__doc__ or "").strip().splitlines()[0]
