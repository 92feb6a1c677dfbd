"""`tfdist settings [PATTERN …]`: every setting, or those that a pattern names, from what they declare.

Invariant: what a user did wrong ends with one message and exit status 2.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist import command_line
from tfdist.command_line import flags
from tfdist.errors import UserError, suggest
from tfdist.main import load_roots
from tfdist.settings.declaration import format_default

ABOUT = """\
tfdist settings [PATTERN …] [FLAGS]

Lists the settings: name, default, what it may be, meaning. A PATTERN is a name, a part of one, or has stars.
`tfdist validate EXPERIMENT.gin` says where an experiment sets each.

  tfdist settings train.checkpoint 'tune.*'
"""
FLAGS = flags.FlagValues()


@dataclasses.dataclass(frozen=True)
class Description:
    """One setting: its full name, default as gin writes it (None: required), kinds of value and meaning."""

    name: str
    default: str | None
    kind: str
    meaning: str


def run(arguments: Sequence[str]) -> None:
    """Prints the settings that the arguments name."""
    _, patterns = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT)
    described = list(list_settings())
    for pattern in patterns:
        if not any(_matches(each.name, pattern) for each in described):
            names = [each.name for each in described]
            raise UserError(f"No setting is called {pattern!r}.{suggest(pattern, names)} tfdist settings lists all.")
    chosen = [each for each in described if not patterns or any(_matches(each.name, pattern) for pattern in patterns)]
    print("\n\n".join(map(_format_entry, chosen)), flush=True)


def list_settings() -> Iterator[Description]:
    """Yields every setting that gin files may give, class by class, in the order of declaration. Imports TensorFlow."""
    roots: dict[str, Any] = dict(load_roots(verbose=False))
    from tfdist.checkpoint.policy import CheckpointPolicy

    for part in (*roots.values(), CheckpointPolicy):
        for field in dataclasses.fields(part):
            about = part.declarations()[field.name]
            kind = about.check.wanted + (f" ({about.unit})" if about.unit else "")
            changes = "; may change on resume" if about.may_change else ""
            yield Description(f"{part.NAME}.{field.name}", format_default(field), kind + changes, about.meaning)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) if "*" in pattern else pattern in name


def _format_entry(each: Description) -> str:
    default = "required" if each.default is None else f"= {each.default}"
    return f"{each.name} {default}\n    {each.kind}\n    {each.meaning}"
