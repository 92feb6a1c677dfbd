"""Writes a configuration: as gin text that loads again, as a table for a reader, by Python's own names.

Invariant: the order of what is written depends on names only, never on the order or the files of the statements. Knows
nothing of gin's own state; called by `tfdist.config.loading` only.
"""

from __future__ import annotations

import itertools
import math
import pprint
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.config.functions import Function
from tfdist.config.graph import CONSTANT, MACRO, Reference, Setting, map_references, setting_name

WIDTH = 120  # characters a line of gin text
MAX_PADDING = 48  # characters of a name or a value that the table aligns


class _Verbatim(str):
    """Text that pprint writes as it stands."""

    def __repr__(self) -> str:
        return str(self)


def value_text(value: Any, name: Callable[[str], str], *, width: int = 10**6) -> str:
    """Formats a value as gin text.

    Args:
      name: gives the name to write for a reference's target.
      width: characters a line; longer containers take several lines.
    """

    def format_part(part: Any) -> Any:
        if isinstance(part, float):  # gin has no word for infinity; a number too large for a float is one
            return _Verbatim(repr(part).replace("inf", "1e999")) if math.isinf(part) else part
        if part.target in (MACRO, CONSTANT):
            return _Verbatim("%" + "/".join(part.scope))
        return _Verbatim("@" + "/".join([*part.scope, name(part.target)]) + ("()" if part.evaluate else ""))

    return pprint.pformat(map_references(value, format_part, (Reference, float)), width=width, sort_dicts=False)


def config_text(
    settings: Iterable[Setting],
    functions: Mapping[str, Function],
    imports: Iterable[str],
    defaults: Iterable[Setting] = (),
) -> str:
    """Gin text with the settings, grouped by function, macros first, then the defaults that a run has used."""
    lines = ["# What a run is configured with: loading this file again configures the same run.", *imports]
    for chosen, used in ((settings, ""), (defaults, ": defaults that the run has used")):
        for group, some in _group(chosen, functions):
            lines += ["", f"# {group}{used}", *(_statement(setting, functions) for setting in some)]
    return "\n".join(lines) + "\n"


def _statement(setting: Setting, functions: Mapping[str, Function]) -> str:
    left = f"{setting_name(setting, functions)} = "
    text = value_text(setting.value, lambda target: functions[target].name, width=max(WIDTH - len(left), WIDTH // 2))
    return left + text.replace("\n", "\n" + " " * len(left))


def _group(settings: Iterable[Setting], functions: Mapping[str, Function]) -> Iterator[tuple[str, Iterator[Setting]]]:
    """The settings by function, macros first."""

    def order(setting: Setting) -> tuple[bool, str, str, str]:
        name = functions[setting.target].name
        return setting.target != MACRO, name, "/".join(setting.scope), setting.parameter

    def name_group(setting: Setting) -> str:
        if setting.target == MACRO:
            return "Macros"
        return "/".join([*setting.scope, functions[setting.target].name])

    return itertools.groupby(sorted(settings, key=order), name_group)


def explanation(settings: Sequence[Setting], used: Sequence[Setting], functions: Mapping[str, Function]) -> str:
    """Formats the table that `Config.explain` returns.

    Args:
      settings: all statements in the order in which they were applied.
      used: those that hold.
    """
    by_key: dict[Any, list[Setting]] = {}
    for setting in settings:
        by_key.setdefault(setting.key, []).append(setting)
    rows = {}  # setting → its name, its value on one line
    for setting in settings:
        text = value_text(setting.value, lambda target: functions[target].name)
        unit = functions[setting.target].units.get(setting.parameter) if setting.target != MACRO else None
        text += f"  # {unit}" if unit else ""
        rows[id(setting)] = setting_name(setting, functions), text
    widths = [min(max((len(row[column]) for row in rows.values()), default=0), MAX_PADDING) for column in (0, 1)]

    def table(chosen: Iterable[Setting]) -> list[str]:
        """Lines of the settings, by function."""
        lines: list[str] = []
        column = 2 + widths[0] + 3 + widths[1]
        for group, some in _group(chosen, functions):
            lines += ["", group]
            for setting in some:
                name, text = rows[id(setting)]
                origin = [setting.source.location]
                for earlier in reversed(by_key[setting.key][:-1]):
                    origin.append(f"overrides {rows[id(earlier)][1]} of {earlier.source.location}")
                line = f"  {name:<{widths[0]}} = {text:<{widths[1]}}"
                if len(line) <= column:
                    line += f"  {origin.pop(0)}"
                lines += [line.rstrip(), *(f"{'':{column}}  {note}" for note in origin)]
        return lines

    kept = {setting.key for setting in used}
    idle = [group[-1] for key, group in by_key.items() if key not in kept]
    lines = table(used)[1:]
    if idle:
        lines += ["", "Without effect, because a later statement chose something else:", *table(idle)]
    return "\n".join(lines) + "\n"


def settings(used: Iterable[Setting], functions: Mapping[str, Function]) -> dict[str, str]:
    """Formats values as text by full name, with macros expanded; those that repeat a default are left out."""
    macros = {setting.scope: setting.value for setting in used if setting.target == MACRO}

    def expand_macros(reference: Reference) -> Any:
        if reference.target == MACRO:
            return map_references(macros[reference.scope], expand_macros)
        return reference

    found = {}
    for setting in used:
        if setting.target == MACRO:
            continue
        function = functions[setting.target]
        text = value_text(map_references(setting.value, expand_macros), lambda target: functions[target].identity)
        default = function.parameters.get(setting.parameter)
        if setting.parameter in function.parameters and not setting.scope and text == repr(default):
            continue
        found["/".join([*setting.scope, f"{function.identity}.{setting.parameter}"])] = text
    return found
