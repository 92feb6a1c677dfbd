"""What a name means in a gin file: the imports there, and the roots.

Invariant: a name that is not known, or means several things, is a `UserError` that says which line to add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gin import config as gin_config
from gin import selector_map
from gin.config_parser import ImportStatement

from tfdist.config import files_and_modules
from tfdist.errors import UserError, build_user_error, suggest

# gin's version is pinned. Of its private names this module uses _REGISTRY, _INVERSE_REGISTRY and _inverse_lookup of
# gin.config, and what Context takes from ParseContext.


WITHOUT_IMPORT = ("keras", "tfdist")


class Context(gin_config.ParseContext):
    """The meaning of names in one file: its imports, the roots, and gin's own.

    Args:
      imported_elsewhere: the line and the place of imports in other files, by the names that they bind.
    """

    def __init__(
        self, roots: Mapping[str, gin_config.Configurable], imported_elsewhere: Mapping[str, tuple[str, str]]
    ) -> None:
        super().__init__()
        self._enable_dynamic_registration()
        self._roots = roots
        self._imported_elsewhere = imported_elsewhere
        self._ambiguous: dict[str, list[str]] = {}  # names that mean several modules: the imports that bind them
        self._symbol_table.update({name: root.wrapped for name, root in roots.items()})

    def adopt(self, other: Context) -> None:
        """Knows by name what another file does; what the two mean different modules by has to be imported here."""
        for name, statement in other._symbol_source.items():
            if statement is None:  # gin's own
                continue
            module = other._symbol_table[name]
            if self._symbol_table.setdefault(name, module) is not module:
                known = self._ambiguous.setdefault(name, [self._symbol_source[name].format()])
                known += [statement.format()] if statement.format() not in known else []
            self._symbol_source.setdefault(name, statement)
        self._ambiguous |= {n: lines for n, lines in other._ambiguous.items() if n not in self._ambiguous}

    def run_import(self, statement: ImportStatement) -> None:
        """Makes the name that an import binds known; raises UserError where it cannot be imported or is taken."""
        if statement.module.startswith("__gin__."):
            if statement.format() != "from __gin__ import dynamic_registration":
                raise UserError(
                    f"gin has nothing for {statement.format()!r}. Write 'from __gin__ import dynamic_registration'."
                )
            return
        name = statement.bound_name()
        if name in (*self._roots, "gin"):
            raise UserError(
                f"the name {name!r} has a meaning of its own in every gin file. "
                f"Import the module under another: '{statement.format()} as my_{name}'."
            )
        files_and_modules.import_module(statement.format(), statement.module)
        self.process_import(statement)
        self._ambiguous.pop(name, None)

    def find(self, selector: str) -> gin_config.Configurable:
        """The function or class that `module.function` names, registered with gin if it was not yet."""
        first, *rest = selector.split(".")
        if first not in self._symbol_table and first in WITHOUT_IMPORT:
            self.run_import(ImportStatement(first, is_from=False, alias=None, location=None))
        if first not in self._symbol_table:
            raise build_user_error(self._explain_not_imported(selector), error_id="unknown-name")
        if first in self._ambiguous:
            lines = " and ".join(map(repr, self._ambiguous[first]))
            raise UserError(f"the name {first!r} may be of {lines}. Add the line that is meant to this file.")
        holder, path = self._symbol_table[first], first
        for part in rest:
            if not hasattr(holder, part):
                raise UserError(_explain_no_attribute(holder, path, part))
            holder, path = getattr(holder, part), f"{path}.{part}"
        if not callable(holder):
            raise UserError(f"{path} is a {type(holder).__name__}, not a function or a class.")
        try:
            return gin_config._inverse_lookup(holder) or self._register(*self._resolve_selector(selector))
        except Exception as error:
            raise UserError(f"gin cannot configure {path}: {error}") from error

    def _explain_not_imported(self, selector: str) -> str:
        name = selector.split(".")[0]
        if name in self._imported_elsewhere:
            line, location = self._imported_elsewhere[name]
            advice = (
                f" Add the line {line!r}, as {location} does: an import holds in its own file and in those that "
                "include it."
            )
        elif line := files_and_modules.guess_import(name):
            advice = f" Add the line {line!r}."
        else:
            advice = suggest(name, [n for n in self._symbol_table if n != "gin"]) or (
                " Import its module, and write module.function." if "." not in selector else " Import its module."
            )
        return f"the name {name!r} is not imported here.{advice}"


def _explain_no_attribute(holder: Any, path: str, name: str) -> str:
    if files_and_modules.is_submodule(holder, name):
        return f"{path}.{name} is a module of its own. Add the line 'from {holder.__name__} import {name}'."
    return f"{path} has no {name!r}.{suggest(name, [known for known in dir(holder) if not known.startswith('_')])}"


class RegisteredContext(gin_config.ParseContext):
    """Looks up complete selectors, for references whose names have been resolved."""

    def get_configurable(self, selector: str) -> gin_config.Configurable:
        return gin_config._REGISTRY[selector]


def forget_registrations() -> None:
    """Drops what earlier configurations registered, and keeps what decorators did: they run once in a process."""
    registry = selector_map.SelectorMap()
    for selector, configurable in gin_config._REGISTRY.items():
        if configurable.import_source is None:
            registry[selector] = configurable
    inverse = {
        fn: configurable for fn, configurable in gin_config._INVERSE_REGISTRY.items() if not configurable.import_source
    }
    gin_config._REGISTRY, gin_config._INVERSE_REGISTRY = registry, inverse
