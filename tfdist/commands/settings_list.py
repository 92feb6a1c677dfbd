"""`tfdist settings [PATTERN …]`: every setting, or those that a pattern names, from what they declare.

Invariant: what a user did wrong ends with one message and exit status 2.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist import command_line
from tfdist.command_line import exit_status_of, flags
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status_of(lambda: run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> None:
    """Prints the settings that the arguments name."""
    _, patterns = command_line.parse_with_operands(FLAGS, arguments, about=ABOUT)
    described = dict(describe_settings())
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in described):
            near = suggest(pattern, list(described))
            raise UserError(f"No setting is called {pattern!r}.{near} tfdist settings lists all.")
    chosen = [name for name in described if not patterns or any(_matches(name, pattern) for pattern in patterns)]
    print("\n\n".join(described[name] for name in chosen), flush=True)


def describe_settings() -> Iterator[tuple[str, str]]:
    """The name and the entry of every setting of every root, in the order of declaration. Imports TensorFlow."""
    roots: dict[str, Any] = dict(load_roots(verbose=False))
    from tfdist.checkpoint.policy import CheckpointPolicy

    for part in (*roots.values(), CheckpointPolicy):
        for field in dataclasses.fields(part):
            about = part.declarations()[field.name]
            name, written = f"{part.NAME}.{field.name}", format_default(field)
            default = "required" if written is None else f"= {written}"
            kind = about.check.wanted + (f" ({about.unit})" if about.unit else "")
            changes = "; may change on resume" if about.may_change else ""
            yield name, f"{name} {default}\n    {kind}{changes}\n    {about.meaning}"


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) if "*" in pattern else pattern in name
