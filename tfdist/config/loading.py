"""The configuration: reads gin files, checks all that can be checked before a run, and calls a root with it.

Invariant: a mistake of the user is a `UserError` that names the statement, and those that need no TensorFlow to be seen
(files, syntax, misspelt macros) are raised before anything is imported. Called by `tfdist.main` and by tuning's trials.

What differs from plain gin: dynamic registration is always on; the roots have plain names (`train.epochs`) in every
file; a `--gin_param` may use whatever the files import; `@f(a=1)` gives a call its arguments in place; a setting that
nothing uses is an error; an exception that called code raises keeps its type, message and traceback, and gin's account
of the call becomes a note on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from gin import config as gin_config
from gin.config_parser import ImportStatement

from tfdist import user_code
from tfdist.config import files_and_modules, formatting, graph
from tfdist.config.functions import Function, describe
from tfdist.config.gin_names import Context, RegisteredContext, forget_registrations
from tfdist.config.graph import CONSTANT, MACRO, Call, Graph, Reference, Setting, StatementSource
from tfdist.config.statements import MODULES_IN, PARAMS, Reader, Statement, check_macros, name_source
from tfdist.config.syntax import INLINE, Assignment
from tfdist.errors import UserError, build_user_error, suggest

# gin's version is pinned. Of its private names this module uses, in gin.config:
#   _CONFIG, _OPERATIVE_CONFIG, _SINGLETONS, _CONFIG_IS_LOCKED: what a call of a configurable function reads and writes;
#   _REGISTRY, _INVERSE_REGISTRY, _CONSTANTS, _PARSE_CONTEXTS, _make_configurable: what a name means.
FUNCTIONS = ("train_data", "eval_data", "data", "model")  # settings of roots that take a function
EVAL_SET = ".EvalSet"  # which takes a function too, and is no function itself
MAX_SETTINGS_SHOWN = 6
MAX_SHOWN_PARAMETERS = 20  # of a function, behind the name that was meant
_ROOT = ("a root", "")  # stands where dynamic registration keeps the import that a function came by


def _reraise_with_note(error: Exception, message: str) -> NoReturn:
    """Takes the place of a function of gin's that raises a proxy with a longer message and no cause."""
    error.add_note(message.strip())
    raise error


gin_config.utils.augment_exception_message_and_reraise = _reraise_with_note


@dataclass(frozen=True)
class Config:
    """A checked configuration. `load` makes it; it stays as it is whatever is loaded afterwards."""

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
        bindings = {call: graph.substitute_run_dir(given, run_dir) for call, given in self._gin_bindings.items()}
        with _gin_state(bindings, self._operative), gin_config.config_scope(None):
            return use(self._roots[root_name].wrapper())

    def user_error(self, error: BaseException) -> UserError | None:
        """Returns the error to show for an exception of `run`; None where tfdist itself failed.

        Everything that the configuration names is called by gin, so gin's frames tell which of it raised.
        """
        roots = {root.selector for root in self._roots.values()}
        called = [selector for selector in _list_calls(error) if selector not in roots]
        if called and called[-1] in self._functions:
            failure = user_code.build_error(f"{self._functions[called[-1]].name}()", error)
            settings = [setting for setting in self._used if setting.target == called[-1]][:MAX_SETTINGS_SHOWN]
            text = "\n    ".join([str(failure), *map(self._describe_setting, settings)])
            return build_user_error(text, error_id=failure.error_id)
        if user_code.may_pass(error):
            return None
        refused = user_code.refused_values(error)
        if refused is None and user_code.list_own_frames(error):
            return user_code.build_error("Your code", error)
        return refused

    def _describe_setting(self, setting: Setting) -> str:
        value = formatting.value_text(setting.value, lambda target: self._functions[target].name)
        return f"{graph.setting_name(setting, self._functions)} = {value}  ({setting.source.location})"

    def text(self) -> str:
        """Formats the configuration as gin text: `load` makes the same configuration of it."""
        return formatting.config_text(self._used, self._functions, self._imports)

    def operative_text(self) -> str:
        """`text()` and, for the functions that runs of this configuration have called, the defaults they used."""
        with gin_config._OPERATIVE_CONFIG_LOCK:
            called = {call: dict(parameters) for call, parameters in self._operative.items()}
        starts = [Call(root.selector) for root in self._roots.values()]
        reached = {call.target for call, _ in Graph(self._used, shadowing=True).walk(starts)} - {MACRO, CONSTANT}
        defaults = {}
        for (scope, target), parameters in sorted(called.items()):
            within = tuple(scope.split("/")) if scope else ()
            bound = {s.parameter for s in self._used if s.target == target and s.scope == within[: len(s.scope)]}
            for name in parameters.keys() - bound if target in reached else ():
                defaults[target, name] = Setting((), target, name, parameters[name], StatementSource("a default"))
        return formatting.config_text(self._used, self._functions, self._imports, defaults.values())

    def explain(self) -> str:
        """A table of the settings that hold, by function: value, where it was set, what it overrides there."""
        return formatting.explanation(self._settings, self._used, self._functions)

    def settings(self) -> dict[str, str]:
        """Values as text by full name, macros expanded, defaults omitted; the same after loading `text()` again."""
        return formatting.settings(self._used, self._functions)

    def configured_roots(self) -> set[str]:
        """The roots that some statement gives a value."""
        return {name for name, root in self._roots.items() if any(s.target == root.selector for s in self._settings)}


def load(
    *,
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    roots: Callable[[], Mapping[str, Callable[..., Any]]],
    inherited: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Config:
    """Reads gin files, then params; the later statement wins.

    Args:
      gin_files: paths, relative ones to the working directory.
      gin_params: statements, such as `train.epochs = 3` or `from tfdist.models import mlp`.
      roots: gives the functions or classes that `Config.run` can call, by their plain names. It is called after all
        that can be checked without them, because it imports TensorFlow.
      inherited: settings of roots, such as `evaluate.model`, that take the value of others where they have none: of the
        first that has one.

    Raises:
      UserError: anything that the user wrote is wrong.
    """
    reader = _read(gin_files, gin_params)
    with _gin_state({}, {}):
        return _Loader(roots(), reader).load(inherited)


def read_statements(*, gin_files: Sequence[str], gin_params: Sequence[str]) -> dict[str, str]:
    """Reads the values of files and params, as text by name, the later winning; nothing that they name is imported.

    Raises:
      UserError: a file is missing or cannot be read, or a macro that is used has no definition.
    """
    found: dict[str, str] = {}
    for statement in _read(gin_files, gin_params).statements:
        content = statement.content
        if isinstance(content, ImportStatement):
            found[f"import {content.bound_name()}"] = content.format()
        elif isinstance(content, Assignment) and content.parameter is not None:
            name = "/".join((*content.scope, content.function))
            found[f"{name}.{content.parameter}".rstrip(".")] = formatting.value_text(content.value, str)
    return found


def _read(gin_files: Sequence[str], gin_params: Sequence[str]) -> Reader:
    """All statements, macros checked as far as can be without an import."""
    reader = Reader()
    for name in gin_files:
        reader.read_file(name)
    reader.read_params(gin_params)
    check_macros(reader.statements, is_constant=_is_constant, imported=False)
    return reader


@contextlib.contextmanager
def _gin_state(
    bindings: dict[tuple[str, str], dict[str, Any]], operative: dict[tuple[str, str], dict[str, Any]]
) -> Iterator[None]:
    """Sets gin's configuration while the context lasts, and then restores the one before."""
    state = {"_CONFIG": bindings, "_OPERATIVE_CONFIG": operative, "_SINGLETONS": {}, "_CONFIG_IS_LOCKED": False}
    before = {name: getattr(gin_config, name) for name in state}
    vars(gin_config).update(state)
    try:
        yield
    finally:
        vars(gin_config).update(before)


def _is_constant(name: str) -> bool:
    return graph.is_run_dir(name) or bool(gin_config._CONSTANTS.matching_selectors(name))


class _Loader:
    """The second pass: statements to settings, with everything imported."""

    def __init__(self, roots: Mapping[str, Callable[..., Any]], reader: Reader) -> None:
        forget_registrations()
        self._statements = reader.statements
        self._included = reader.included
        self._directories = [Path.cwd(), *reader.directories]
        for name, root in roots.items():
            gin_config._make_configurable(root, name=name, import_source=_ROOT, avoid_class_mutation=True)
        self._roots = {name: gin_config._INVERSE_REGISTRY[root] for name, root in roots.items()}
        self._root_targets = {root.selector for root in self._roots.values()}
        self._configurables = {root.selector: root for root in self._roots.values()}
        self._configurables[MACRO] = gin_config._REGISTRY[MACRO]
        self._contexts: dict[int, Context] = {}
        self._macros = {s.content.macro for s in self._statements if isinstance(s.content, Assignment)} - {None}

    def load(self, inherited: Mapping[str, Sequence[str]]) -> Config:
        """The configuration; imports what the statements name, and raises UserError for what is wrong in them."""
        self._run_imports()
        check_macros(self._statements, is_constant=_is_constant, imported=True)
        assignments = [(s, s.content) for s in self._statements if isinstance(s.content, Assignment)]
        # All left sides first: a method that is configured makes gin register its class anew.
        targets = [self._resolve_target(statement, content) for statement, content in assignments]
        settings = []
        for (statement, content), target in zip(assignments, targets, strict=True):
            if content.parameter is not None:
                with name_source(statement.source):
                    value = graph.map_references(content.value, functools.partial(self._resolve, file=statement.file))
                if content.parameter in FUNCTIONS and (target in self._root_targets or target.endswith(EVAL_SET)):
                    value = _leave_uncalled(value)
                scope, parameter = (content.macro, "value") if content.macro else (content.scope, content.parameter)
                settings.append(Setting(scope, target, parameter, value, statement.source))
        return self._config([*settings, *self._inherit_settings(settings, inherited)])

    def _inherit_settings(
        self, settings: Sequence[Setting], inherited: Mapping[str, Sequence[str]]
    ) -> Iterator[Setting]:
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
        files_and_modules.search_modules_in(self._directories)
        imports = [(s, s.content) for s in self._statements if isinstance(s.content, ImportStatement)]
        elsewhere = {content.bound_name(): (content.format(), s.source.location) for s, content in imports}
        for file in sorted(self._included, reverse=True):  # an included file comes after the file that includes it
            context = self._contexts[file] = Context(self._roots, elsewhere)
            visible = [f for f in self._included if f != PARAMS] if file == PARAMS else self._included[file]
            for other in visible:
                context.adopt(self._contexts[other])
            for statement, content in imports:
                if statement.file == file:
                    with name_source(statement.source):
                        context.run_import(content)

    def _resolve_target(self, statement: Statement, content: Assignment) -> str:
        """Returns the selector of the configurable that an assignment sets; UserError if it lacks the parameter."""
        if content.macro:
            return MACRO
        with name_source(statement.source):
            configurable = self._find(content.function, statement.file)
            if configurable.selector == MACRO:
                raise UserError("a macro is defined by its name: NAME = VALUE.")
            function = _describe(configurable, name=content.function)
            if content.parameter is None or content.parameter in function.parameters or function.takes_any:
                return configurable.selector
            name = f"{content.function}.{content.parameter}"
            if name in files_and_modules.REMOVED:
                raise UserError(f"{name} is gone. {files_and_modules.REMOVED[name]}")
            known = list(function.parameters)
            near = suggest(content.parameter, known)
            others = f" Its parameters: {', '.join(known)}." if known else " It has no parameters."
            if near and len(known) > MAX_SHOWN_PARAMETERS:
                others = ""
            raise build_user_error(
                f"{content.function} has no parameter {content.parameter!r}.{near}{others}", error_id="unknown-setting"
            )

    def _find(self, selector: str, file: int) -> gin_config.Configurable:
        configurable = self._contexts[file].find(selector)
        self._configurables[configurable.selector] = configurable
        return configurable

    def _resolve(self, reference: Reference, file: int) -> Reference:
        if reference.target == MACRO and reference.scope not in self._macros:
            name = "/".join(reference.scope)
            if graph.is_run_dir(name):
                return Reference(CONSTANT, (name,), True)
            constants = gin_config._CONSTANTS.matching_selectors(name)
            if len(constants) > 1:
                raise UserError(f"%{name} may be any of {', '.join(sorted(constants))}. Write more of its name.")
            return Reference(CONSTANT, (constants[0],), True)
        target = MACRO if reference.target == MACRO else self._find(reference.target, file).selector
        return Reference(target, reference.scope, reference.evaluate)

    def _config(self, settings: Sequence[Setting]) -> Config:
        imports, names = self._name_targets()
        functions = {target: _describe(c, name=names[target]) for target, c in self._configurables.items()}
        roots = {name: root.selector for name, root in self._roots.items()}
        graph.check_all_used(settings, functions, roots)
        kept = list({setting.key: setting for setting in settings}.values())  # those that no later one overrides
        in_force = Graph(kept, shadowing=True)
        graph.check_no_circle(in_force, functions, roots.values())
        graph.check_not_built_early(in_force, functions, roots.values())
        used_ids = in_force.find_used([Call(root) for root in roots.values()])
        used = tuple(setting for setting in kept if id(setting) in used_ids)
        return Config(tuple(settings), used, functions, self._roots, imports, _gin_bindings(used))

    def _name_targets(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """The imports of the written configuration, and the name that each target has with them."""
        on = ImportStatement("__gin__.dynamic_registration", True, None, None)
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
        found = {files_and_modules.find_directory(sys.modules[name]) for name in imported if name in sys.modules}
        mine = {directory.resolve() for directory in self._directories} - {files_and_modules.REPOSITORY}
        yield from (f"{MODULES_IN}{directory}" for directory in sorted(mine & found))


def _leave_uncalled(value: Any) -> Any:
    """`@f(a=1)` as the function with this argument, where a setting takes a function that is called later."""
    if isinstance(value, dict):  # several, by name
        return {name: _leave_uncalled(each) for name, each in value.items()}
    if not isinstance(value, Reference) or value.target.endswith(EVAL_SET):
        return value
    has_arguments = any(part.startswith(INLINE) for part in value.scope[-1:])
    return dataclasses.replace(value, evaluate=False) if has_arguments else value


def _gin_bindings(settings: Sequence[Setting]) -> dict[tuple[str, str], dict[str, Any]]:
    bindings: dict[tuple[str, str], dict[str, Any]] = {}
    gin_config._PARSE_CONTEXTS.append(RegisteredContext())
    try:
        for setting in settings:
            value = graph.map_references(setting.value, _gin_value)
            bindings.setdefault(("/".join(setting.scope), setting.target), {})[setting.parameter] = value
    finally:
        gin_config._PARSE_CONTEXTS.pop()
    return bindings


def _gin_value(reference: Reference) -> gin_config.ConfigurableReference | str:
    if reference.target == CONSTANT and graph.is_run_dir(reference.scope[0]):
        return f"%{reference.scope[0]}"  # which `Config.run` makes a path
    return gin_config.ConfigurableReference("/".join([*reference.scope, reference.target]), reference.evaluate)


def _describe(configurable: gin_config.Configurable, *, name: str) -> Function:
    return describe(configurable.wrapped, name=name, identity=name if configurable.import_source is _ROOT else "")


def _list_calls(error: BaseException) -> list[str]:
    """The selectors of the calls by gin that an exception came through, outermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_gin = [f for f in frames if f.f_code.co_filename == gin_config.__file__ and f.f_code.co_name == "gin_wrapper"]
    return [f.f_locals["selector"] for f in of_gin]
