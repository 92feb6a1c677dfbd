"""The configuration: reads gin files, checks all that can be checked before a run, and calls a root with it.

Invariant: a mistake of the user is a `UserError` that names the statement, and those that need no TensorFlow to be seen
(files, syntax, misspelt macros) are raised before anything is imported. The only module that imports gin; called by
`tfdist.main` and by tuning's trials.

What differs from plain gin: dynamic registration is always on; the roots have plain names (`train.epochs`) in every
file; a `--gin_param` may use whatever the files import; `@f(a=1)` gives a call its arguments in place; a setting that
nothing uses is an error; an exception that called code raises keeps its type, message and traceback, and gin's account
of the call becomes a note on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NoReturn

from gin import config as gin_config
from gin import config_parser, selector_map

from tfdist import user_code
from tfdist.config import files, graph, report, run_directory
from tfdist.config.functions import Function, describe
from tfdist.config.graph import CONSTANT, MACRO, Graph, Reference, Setting, Source
from tfdist.config.report import Binding
from tfdist.config.statements import (
    MODULES_IN,
    PARAMS,
    Assignment,
    Import,
    Include,
    Reader,
    Statement,
    check_macros,
    stated_at,
)
from tfdist.errors import UserError, is_unicode, suggest

# gin's version is pinned. Of its private names this module uses, in gin.config:
#   _CONFIG, _OPERATIVE_CONFIG, _SINGLETONS, _CONFIG_IS_LOCKED: what a call of a configurable function reads and writes;
#   _REGISTRY, _INVERSE_REGISTRY, _CONSTANTS, _PARSE_CONTEXTS: what a name means;
#   _make_configurable, _inverse_lookup, and what _Context takes from ParseContext.
MAX_SETTINGS_SHOWN = 6
MAX_NESTING = 50  # brackets and calls within each other
INLINE = "with_"  # begins the scope that holds the arguments of `@f(a=1)`
_ROOT = ("a root", "")  # stands where dynamic registration keeps the import that a function came by


def _reraise_with_note(error: Exception, message: str) -> NoReturn:
    """Takes the place of a function of gin's that raises a proxy with a longer message and no cause."""
    error.add_note(message.strip())
    raise error


gin_config.utils.augment_exception_message_and_reraise = _reraise_with_note


@dataclass(frozen=True)
class Config:
    """A checked configuration. `load` makes it; it stays as it is whatever is loaded afterwards.

    Attributes:
      bindings: every statement that gives a value, in the order in which they were applied.
    """

    bindings: tuple[Binding, ...]
    _settings: tuple[Setting, ...]
    _used: tuple[Setting, ...]
    _functions: Mapping[str, Function]
    _roots: Mapping[str, gin_config.Configurable]
    _imports: tuple[str, ...]
    _gin_bindings: dict[tuple[str, str], dict[str, Any]]
    _operative: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    def check(self, root_name: str) -> None:
        """Everything that the root reaches has a value.

        Raises:
          UserError: naming what is missing.
        """
        if root_name not in self._roots:
            raise UserError(f"there is no {root_name!r} among {sorted(self._roots)}.{suggest(root_name, self._roots)}")
        graph.check_complete(self._used, self._functions, self._roots[root_name].selector)

    def run(self, root_name: str, use: Callable[[Any], Any] = lambda made: made, *, run_dir: str | None = None) -> Any:
        """Calls a root, and `use` with what it returns, within this configuration; what `use` returns.

        Args:
          root_name: one of the names that `load` was given.
          use: calls functions of the configuration; it may run another one.
          run_dir: what `%RUN_DIR` stands for.

        Raises:
          UserError: something that the run needs has no value. Whatever the called code raises comes through as it is.
        """
        self.check(root_name)
        bindings = _placed(self._gin_bindings, run_dir)
        with _gin_state(bindings, self._operative), gin_config.config_scope(None):
            try:
                return use(self._roots[root_name].wrapper())
            except (TypeError, RuntimeError) as error:
                missing = _missing_in_call(error, self._functions)
                if missing is None:
                    raise
                raise missing from error

    def user_error(self, error: BaseException) -> UserError | None:
        """What to tell the user about an exception of `run`; None where tfdist itself failed.

        Everything that the configuration names is called by gin, so gin's frames tell which of it raised.
        """
        roots = {root.selector for root in self._roots.values()}
        called = [selector for selector in _calls_by_gin(error) if selector not in roots]
        if called and called[-1] in self._functions:
            failure = user_code.failed(f"{self._functions[called[-1]].name}()", error)
            settings = [setting for setting in self._used if setting.target == called[-1]][:MAX_SETTINGS_SHOWN]
            return UserError("\n    ".join([str(failure), *map(self._stated, settings)]))
        refused = user_code.refused_values(error)
        if refused is None and user_code.own_places(error):
            return user_code.failed("Your code", error)
        return refused

    def _stated(self, setting: Setting) -> str:
        value = report.value_text(setting.value, lambda target: self._functions[target].name)
        return f"{graph.setting_name(setting, self._functions)} = {value}  ({setting.source.location})"

    def text(self) -> str:
        """The configuration that holds, as gin text: `load` makes the same configuration of it."""
        return report.config_text(self._used, self._functions, self._imports)

    def operative_text(self) -> str:
        """`text()` and, for the functions that runs of this configuration have called, the defaults they used."""
        with gin_config._OPERATIVE_CONFIG_LOCK:
            called = {call: dict(parameters) for call, parameters in self._operative.items()}
        reached = self._reached_targets()
        defaults = {}
        for (scope, target), parameters in sorted(called.items()):
            within = tuple(scope.split("/")) if scope else ()
            bound = {s.parameter for s in self._used if s.target == target and s.scope == within[: len(s.scope)]}
            for name in parameters.keys() - bound if target in reached else ():
                defaults[target, name] = Setting((), target, name, parameters[name], Source("a default"))
        return report.config_text(self._used, self._functions, self._imports, defaults.values())

    def explain(self) -> str:
        """A table of the settings that hold, by function: value, where it was set, what it overrides there."""
        return report.explanation(self._settings, self._used, self._functions)

    def digest(self) -> str:
        """SHA-256 of what holds, in hex, the same for `text()` and `operative_text()` when they are loaded again."""
        return report.digest(self._used, self._functions)

    def settings(self) -> dict[str, str]:
        """What holds, by Python's own names: `digest` is over this."""
        return report.settings(self._used, self._functions)

    def _reached_targets(self) -> set[str]:
        starts = graph.starting_calls(self._used, self._functions, [root.selector for root in self._roots.values()])
        return {call.target for call, _ in Graph(self._used, shadowing=True).walk(starts)} - {MACRO, CONSTANT}


def read_url(url: str) -> str:
    """The text of a gin file in a bucket."""
    from tfdist.storage import files as stored

    try:
        return stored.read(url).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The gin file {url!r} cannot be read: {' '.join(str(error).split())}") from error


def load(
    *,
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    roots: Callable[[], Mapping[str, Callable[..., Any]]],
    read_url: Callable[[str], str] = read_url,
    inherited: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Config:
    """Reads gin files, then params; the later statement wins.

    Args:
      gin_files: paths, relative ones to the working directory.
      gin_params: statements, such as `train.epochs = 3` or `from tfdist.models import mlp`.
      roots: gives the functions or classes that `Config.run` can call, by their plain names. It is called after all
        that can be checked without them, because it imports TensorFlow.
      read_url: reads a gin file whose name holds `://`.
      inherited: settings of roots, such as `evaluate.model`, that take the value of others where they have none: of the
        first that has one.

    Raises:
      UserError: anything that the user wrote is wrong.
    """
    reader = _read(gin_files, gin_params, read_url)
    with _gin_state({}, {}):
        return _Loader(roots(), reader).load(inherited)


def stated(*, gin_files: Sequence[str], gin_params: Sequence[str]) -> dict[str, str]:
    """What files and params state, as text by name, the later winning; nothing that they name is imported.

    Raises:
      UserError: a file is missing or cannot be read, or a macro that is used has no definition.
    """
    found: dict[str, str] = {}
    for statement in _read(gin_files, gin_params, read_url).statements:
        content = statement.content
        if isinstance(content, Import):
            found[f"import {content.bound_name}"] = str(content)
        elif isinstance(content, Assignment) and content.parameter is not None:
            name = "/".join((*content.scope, content.function))
            found[f"{name}.{content.parameter}".rstrip(".")] = report.value_text(content.value, str)
    return found


def _read(gin_files: Sequence[str], gin_params: Sequence[str], read_url: Callable[[str], str]) -> Reader:
    """All statements, macros checked as far as can be without an import."""
    reader = Reader(_parse, read_url)
    for name in gin_files:
        reader.read_file(name)
    reader.read_params(gin_params)
    check_macros(reader.statements, is_constant=_is_constant, imported=False)
    return reader


@contextlib.contextmanager
def _gin_state(
    bindings: dict[tuple[str, str], dict[str, Any]], operative: dict[tuple[str, str], dict[str, Any]]
) -> Iterator[None]:
    """Puts a configuration in gin's place for it, and afterwards the one that was there."""
    state = {"_CONFIG": bindings, "_OPERATIVE_CONFIG": operative, "_SINGLETONS": {}, "_CONFIG_IS_LOCKED": False}
    before = {name: getattr(gin_config, name) for name in state}
    vars(gin_config).update(state)
    try:
        yield
    finally:
        vars(gin_config).update(before)


def _placed(
    bindings: dict[tuple[str, str], dict[str, Any]], run_dir: str | None
) -> dict[tuple[str, str], dict[str, Any]]:
    """gin's bindings with %RUN_DIR in its place; raises UserError where it is used and there is none."""
    if not run_directory.is_used(list(bindings.values())):
        return bindings
    if run_dir is None:
        raise UserError(f"%{run_directory.NAME} is used, and this command has no run directory.")
    return {call: run_directory.placed(given, run_dir) for call, given in bindings.items()}


def _is_constant(name: str) -> bool:
    return run_directory.is_within(name) or bool(gin_config._CONSTANTS.matching_selectors(name))


class _Delegate(config_parser.ParserDelegate):
    """Leaves the references and macros in a value as they are written."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scope, name = scoped_configurable_name.split("/")
        return Reference(name, tuple(scope), evaluate)

    def macro(self, macro_name: str) -> Reference:
        return Reference(MACRO, tuple(macro_name.split("/")), True)


class _Parser(config_parser.ConfigParser):
    def __init__(self, text: str) -> None:
        super().__init__(io.StringIO(text), _Delegate())
        self.inline: list[Assignment] = []  # the arguments within the statement that was parsed last
        self._nesting = 0
        self._keys: set[Any] = set()  # of the dict that is being read

    def parse_value(self) -> Any:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            self._raise_syntax_error(f"More than {MAX_NESTING} brackets stand within each other.")
        value = super().parse_value()
        self._nesting -= 1
        return value

    def _maybe_parse_container(self) -> tuple[bool, Any]:
        outer, self._keys = self._keys, set()
        parsed = super()._maybe_parse_container()
        self._keys = outer
        return parsed

    def _parse_dict_item(self) -> tuple[Any, Any]:
        location = self._current_location()
        key, value = super()._parse_dict_item()
        try:
            is_repeated = key in self._keys
        except TypeError:  # a list or a dict
            self._raise_syntax_error("Unhashable key.", location)
        if is_repeated:
            self._raise_syntax_error(f"The key {key!r} stands there twice.", location)
        self._keys.add(key)
        return key, value

    def _maybe_parse_basic_type(self) -> tuple[bool, Any]:
        location = self._current_location()
        negative = self.current_token.string == "-"
        success, value = super()._maybe_parse_basic_type()
        if negative and not success:  # gin would forget the sign
            self._raise_syntax_error("Only a number can follow '-'.")
        if isinstance(value, str) and not is_unicode(value):
            self._raise_syntax_error("Not Unicode.", location)
        return success, value

    def _maybe_parse_configurable_reference(self) -> tuple[bool, Any]:
        """As gin's, and `@f(a=1)` too: `@scope/f()` in a scope of its own, with `scope/f.a = 1`."""
        if self._current_token.string != "@":
            return False, None
        self._advance_one_token()
        name = self._parse_selector(allow_periods_in_scope=True)
        evaluate = self._current_token.string == "("
        if evaluate:
            self._advance()
            name = self._with_arguments(name)
        self._skip_whitespace_and_comments()
        return True, self._delegate.configurable_reference(name, evaluate)

    def _with_arguments(self, name: str) -> str:
        """The name, in the scope that holds its arguments if it has any; leaves `)` behind."""
        arguments: dict[str, Any] = {}
        while self._current_token.string != ")":
            if not self._current_token.string.isidentifier():
                self._raise_syntax_error("Expected an argument.")
            argument = self._current_token.string
            if argument in arguments:
                self._raise_syntax_error(f"The argument {argument!r} stands there twice.")
            self._advance()
            if self._current_token.string != "=":
                self._raise_syntax_error("Expected an argument.")
            self._advance()
            arguments[argument] = self.parse_value()
            if self._current_token.string == ",":
                self._advance()
            elif self._current_token.string != ")":
                self._raise_syntax_error("Expected ')'.")
        self._advance_one_token()
        if not arguments:
            return name
        *outer, function = name.split("/")
        scope = (*outer, f"{INLINE}{hashlib.sha256(repr((function, arguments)).encode()).hexdigest()[:8]}")
        self.inline += [Assignment(scope, function, argument, value) for argument, value in arguments.items()]
        return "/".join([*scope, function])


def _parse(text: str) -> Iterator[tuple[Import | Include | Assignment, int, str]]:
    parser = _Parser(text)
    while (parsed := parser.parse_statement()) is not None:
        place = parsed.location.line_num, parsed.location.line_content
        yield from ((argument, *place) for argument in parser.inline)
        parser.inline.clear()
        content: Import | Include | Assignment
        if isinstance(parsed, config_parser.ImportStatement):
            content = Import(parsed.module, parsed.is_from, parsed.alias)
        elif isinstance(parsed, config_parser.IncludeStatement):
            content = Include(parsed.filename)
        else:
            scope = tuple(parsed.scope.split("/")) if parsed.scope else ()
            is_head = isinstance(parsed, config_parser.BlockDeclaration)
            content = Assignment(
                scope, parsed.selector, None if is_head else parsed.arg_name, None if is_head else parsed.value
            )
        yield content, *place


class _Context(gin_config.ParseContext):
    """What names mean in one file: its imports, the roots, gin's own, and what the user's code has decorated."""

    def __init__(
        self, roots: Mapping[str, gin_config.Configurable], imported_elsewhere: Mapping[str, Statement]
    ) -> None:
        super().__init__()
        self._enable_dynamic_registration()
        self._roots = roots
        self._imported_elsewhere = imported_elsewhere
        self._ambiguous: dict[str, list[str]] = {}  # names that mean several modules: the imports that bind them
        self._symbol_table.update({name: root.wrapped for name, root in roots.items()})

    def adopt(self, other: _Context) -> None:
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

    def run_import(self, statement: Import) -> None:
        """Makes the name that an import binds known; raises UserError where it cannot be imported or is taken."""
        if statement.module.startswith("__gin__."):
            if str(statement) != "from __gin__ import dynamic_registration":
                raise UserError(
                    f"gin has nothing for {str(statement)!r}. Write 'from __gin__ import dynamic_registration'."
                )
            return
        if statement.bound_name in (*self._roots, "gin"):
            raise UserError(
                f"the name {statement.bound_name!r} has a meaning of its own in every gin file. "
                f"Import the module under another: '{statement} as my_{statement.bound_name}'."
            )
        parsed = config_parser.ImportStatement(statement.module, statement.is_from, statement.alias, None)
        files.import_module(str(statement), statement.module)
        self.process_import(parsed)
        self._ambiguous.pop(statement.bound_name, None)

    def find(self, selector: str) -> gin_config.Configurable:
        """The function or class that `module.function` names, registered with gin if it was not yet."""
        first, *rest = selector.split(".")
        if first not in self._symbol_table:
            return self._find_decorated(selector)
        if first in self._ambiguous:
            lines = " and ".join(map(repr, self._ambiguous[first]))
            raise UserError(f"the name {first!r} may be of {lines}. Add the line that is meant to this file.")
        holder, path = self._symbol_table[first], first
        for part in rest:
            if not hasattr(holder, part):
                raise UserError(_why_no_attribute(holder, path, part))
            holder, path = getattr(holder, part), f"{path}.{part}"
        if not callable(holder):
            raise UserError(f"{path} is a {type(holder).__name__}, not a function or a class.")
        try:
            return gin_config._inverse_lookup(holder) or self._register(*self._resolve_selector(selector))
        except Exception as error:
            raise UserError(f"gin cannot configure {path}: {error}") from error

    def _find_decorated(self, selector: str) -> gin_config.Configurable:
        found = [c for c in gin_config._REGISTRY.get_all_matches(selector) if _is_decorated(c)]
        if len(found) == 1:
            return found[0]
        if found:
            raise UserError(f"{selector} may be any of {', '.join(c.selector for c in found)}. Write more of its name.")
        name = selector.split(".")[0]
        elsewhere = self._imported_elsewhere.get(name)
        line = str(elsewhere.content) if elsewhere else files.import_line_for(name)
        if line:
            advice = f" Add the line {line!r}."
            if elsewhere:
                advice = (
                    f" Add the line {line!r}, as {elsewhere.source.location} does: an import holds in its own file and "
                    "in those that include it."
                )
        else:
            advice = suggest(name, [n for n in self._symbol_table if n != "gin"]) or (
                " Import its module, and write module.function." if "." not in selector else " Import its module."
            )
        raise UserError(f"the name {name!r} is not imported here.{advice}")


def _why_no_attribute(holder: Any, path: str, name: str) -> str:
    if files.is_submodule(holder, name):
        return f"{path}.{name} is a module of its own. Add the line 'from {holder.__name__} import {name}'."
    return f"{path} has no {name!r}.{suggest(name, [known for known in dir(holder) if not known.startswith('_')])}"


class _Registered(gin_config.ParseContext):
    """Looks up complete selectors, for references whose names have been resolved."""

    def get_configurable(self, selector: str) -> gin_config.Configurable:
        return gin_config._REGISTRY[selector]


def _is_decorated(configurable: gin_config.Configurable) -> bool:
    return configurable.import_source is None and configurable.module != "gin"


class _Loader:
    """The second pass: statements to settings, with everything imported."""

    def __init__(self, roots: Mapping[str, Callable[..., Any]], reader: Reader) -> None:
        _forget_registrations()
        self._statements = reader.statements
        self._included = reader.included
        self._directories = [Path.cwd(), *reader.directories]
        for name, root in roots.items():
            gin_config._make_configurable(root, name=name, import_source=_ROOT, avoid_class_mutation=True)
        self._roots = {name: gin_config._INVERSE_REGISTRY[root] for name, root in roots.items()}
        self._configurables = {root.selector: root for root in self._roots.values()}
        self._configurables[MACRO] = gin_config._REGISTRY[MACRO]
        self._contexts: dict[int, _Context] = {}
        self._macros = {s.content.macro for s in self._statements if isinstance(s.content, Assignment)} - {None}

    def load(self, inherited: Mapping[str, Sequence[str]]) -> Config:
        """The configuration; imports what the statements name, and raises UserError for what is wrong in them."""
        self._run_imports()
        check_macros(self._statements, is_constant=_is_constant, imported=True)
        assignments = [(s, s.content) for s in self._statements if isinstance(s.content, Assignment)]
        # All left sides first: a method that is configured makes gin register its class anew.
        targets = [self._target(statement, content) for statement, content in assignments]
        settings = []
        for (statement, content), target in zip(assignments, targets, strict=True):
            if content.parameter is not None:
                with stated_at(statement.source):
                    value = graph.map_references(content.value, functools.partial(self._resolve, file=statement.file))
                scope, parameter = (content.macro, "value") if content.macro else (content.scope, content.parameter)
                settings.append(Setting(scope, target, parameter, value, statement.source))
        return self._config([*settings, *self._inherited(settings, inherited)])

    def _inherited(self, settings: Sequence[Setting], inherited: Mapping[str, Sequence[str]]) -> Iterator[Setting]:
        known = {(s.target, s.parameter): s for s in settings if not s.scope}  # the last one holds
        for name, others in inherited.items():
            root, _, parameter = name.partition(".")
            target = self._roots[root].selector
            sources = [other.partition(".") for other in others]
            values = [known.get((self._roots[source].selector, of)) for source, _, of in sources]
            setting = next((s for s in values if s is not None and s.value is not None), None)
            if setting is not None and (target, parameter) not in known:
                yield dataclasses.replace(setting, target=target, parameter=parameter)

    def _run_imports(self) -> None:
        files.search_modules_in(self._directories)
        imports = [(s, s.content) for s in self._statements if isinstance(s.content, Import)]
        elsewhere = {content.bound_name: statement for statement, content in imports}
        for file in sorted(self._included, reverse=True):  # an included file comes after the file that includes it
            context = self._contexts[file] = _Context(self._roots, elsewhere)
            visible = [f for f in self._included if f != PARAMS] if file == PARAMS else self._included[file]
            for other in visible:
                context.adopt(self._contexts[other])
            for statement, content in imports:
                if statement.file == file:
                    with stated_at(statement.source):
                        context.run_import(content)

    def _target(self, statement: Statement, content: Assignment) -> str:
        if content.macro:
            return MACRO
        with stated_at(statement.source):
            configurable = self._find(content.function, statement.file)
            if configurable.selector == MACRO:
                raise UserError("a macro is defined by its name: NAME = VALUE.")
            function = _describe(configurable, name=content.function)
            if content.parameter is None or content.parameter in function.parameters or function.takes_any:
                return configurable.selector
            known = list(function.parameters)
            raise UserError(
                f"{content.function} has no parameter {content.parameter!r}.{suggest(content.parameter, known)} "
                + (f"Its parameters: {', '.join(known)}." if known else "It has no parameters.")
            )

    def _find(self, selector: str, file: int) -> gin_config.Configurable:
        configurable = self._contexts[file].find(selector)
        self._configurables[configurable.selector] = configurable
        return configurable

    def _resolve(self, reference: Reference, file: int) -> Reference:
        if reference.target == MACRO and reference.scope not in self._macros:
            name = "/".join(reference.scope)
            if run_directory.is_within(name):
                return Reference(CONSTANT, (name,), True)
            constants = gin_config._CONSTANTS.matching_selectors(name)
            if len(constants) > 1:
                raise UserError(f"%{name} may be any of {', '.join(sorted(constants))}. Write more of its name.")
            return Reference(CONSTANT, (constants[0],), True)
        target = MACRO if reference.target == MACRO else self._find(reference.target, file).selector
        return Reference(target, reference.scope, reference.evaluate)

    def _config(self, settings: Sequence[Setting]) -> Config:
        imports, names = self._written_names()
        functions = {target: _describe(c, name=names[target]) for target, c in self._configurables.items()}
        roots = {name: root.selector for name, root in self._roots.items()}
        graph.check_all_used(settings, functions, roots)
        kept = graph.winners(settings)
        graph.check_keys(kept)
        in_force = Graph(kept, shadowing=True)
        graph.check_no_circle(in_force, functions, roots.values())
        graph.check_not_built_early(in_force, functions, roots.values())
        used_ids = in_force.used(graph.starting_calls(kept, functions, roots.values()))
        kept_ids = {id(setting) for setting in kept}
        bindings = tuple(
            Binding(
                key=graph.setting_name(setting, functions),
                value=report.value_text(setting.value, lambda target: functions[target].name),
                source=setting.source.location,
                overridden=id(setting) not in kept_ids,
                idle=id(setting) in kept_ids and id(setting) not in used_ids,
            )
            for setting in settings
        )
        used = tuple(setting for setting in kept if id(setting) in used_ids)
        return Config(bindings, tuple(settings), used, functions, self._roots, imports, _gin_bindings(used))

    def _written_names(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """The imports of the written configuration, and the name that each target has with them."""
        on = config_parser.ImportStatement("__gin__.dynamic_registration", True, None, None)
        manager = gin_config.ImportManager([on])
        manager.names |= {*self._roots, "gin"}
        imported = {statement for context in self._contexts.values() for statement in context.imports}
        for statement in sorted(imported, key=lambda s: (s.module, not s.is_from, s.alias or "")):
            manager.add_import(statement)
        names = {root.selector: name for name, root in self._roots.items()}
        for target, configurable in sorted(self._configurables.items()):
            if configurable.module == "gin":
                names[target] = target
            elif target not in names:
                manager.require_configurable(configurable)
                names[target] = manager.minimal_selector(configurable)
        lines = [on.format(), *(s.format() for s in manager.sorted_imports if s is not on)]
        return (*self._module_directories(), *lines), names

    def _module_directories(self) -> Iterator[str]:
        """Comments that tell a later reader of the configuration where the modules lie that are not installed."""
        imported = {
            statement.module.split(".")[0] for context in self._contexts.values() for statement in context.imports
        }
        found = {files.directory_of(sys.modules[name]) for name in imported if name in sys.modules}
        mine = {directory.resolve() for directory in self._directories} - {files.REPOSITORY}
        yield from (f"{MODULES_IN}{directory}" for directory in sorted(mine & found))


def _forget_registrations() -> None:
    """Drops what earlier configurations registered, and keeps what decorators did: they run once in a process."""
    registry = selector_map.SelectorMap()
    for selector, configurable in gin_config._REGISTRY.items():
        if configurable.import_source is None:
            registry[selector] = configurable
    inverse = {
        fn: configurable for fn, configurable in gin_config._INVERSE_REGISTRY.items() if not configurable.import_source
    }
    gin_config._REGISTRY, gin_config._INVERSE_REGISTRY = registry, inverse


def _gin_bindings(settings: Sequence[Setting]) -> dict[tuple[str, str], dict[str, Any]]:
    bindings: dict[tuple[str, str], dict[str, Any]] = {}
    gin_config._PARSE_CONTEXTS.append(_Registered())
    try:
        for setting in settings:
            value = graph.map_references(setting.value, _gin_value)
            bindings.setdefault(("/".join(setting.scope), setting.target), {})[setting.parameter] = value
    finally:
        gin_config._PARSE_CONTEXTS.pop()
    return bindings


def _gin_value(reference: Reference) -> gin_config.ConfigurableReference | str:
    if reference.target == CONSTANT and run_directory.is_within(reference.scope[0]):
        return f"%{reference.scope[0]}"  # which `Config.run` makes a path
    return gin_config.ConfigurableReference("/".join([*reference.scope, reference.target]), reference.evaluate)


def _describe(configurable: gin_config.Configurable, *, name: str) -> Function:
    return describe(
        configurable.wrapped,
        name=name,
        identity=name if configurable.import_source is _ROOT else "",
        allowed=configurable.allowlist,
        denied=configurable.denylist or (),
        is_decorated=_is_decorated(configurable),
        no_default=gin_config.REQUIRED,
    )


def _missing_in_call(error: Exception, functions: Mapping[str, Function]) -> UserError | None:
    """The UserError for an exception that says that a call by gin lacked a value; None for any other."""
    call = _failed_call(error)
    if call is None or (function := functions.get(call.f_locals["selector"])) is None:
        return None
    if isinstance(error, RuntimeError):
        missing = call.f_locals.get("missing_required_params", [])
    else:
        supplied = {*call.f_locals.get("new_kwargs", ()), *call.f_locals.get("arg_names", ())}
        missing = [name for name in function.required if name not in supplied]
    return graph.missing_values(function.name, missing) if missing else None


def _calls_by_gin(error: BaseException) -> list[str]:
    """The selectors of the calls by gin that an exception came through, outermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_gin = [f for f in frames if f.f_code.co_filename == gin_config.__file__ and f.f_code.co_name == "gin_wrapper"]
    return [f.f_locals["selector"] for f in of_gin]


def _failed_call(error: Exception) -> FrameType | None:
    """gin's frame of the call that did not even reach the called function's body."""
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        if frame.f_code.co_filename != gin_config.__file__:
            return None
        if frame.f_code.co_name == "gin_wrapper":
            return frame
    return None
