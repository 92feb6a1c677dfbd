"""Which settings of a configuration reach a root, and which values a root still lacks.

Invariant: knows nothing of gin, files or modules; a setting is a scope, a function, a parameter and a value that may
hold references.

Scopes follow gin: a call within scope `a/b` takes the settings of `''`, `a` and `a/b`, the innermost first. A reference
with a scope of its own is called in that one, a reference without in the scope of the function that it was given to. A
macro is a function called in a scope of its own name: what it evaluates runs in there, what it only names does not.
"""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.config.functions import NO_DEFAULT, Function
from tfdist.errors import UserError, build_user_error, suggest

MACRO = "gin.macro"
CONSTANT = "gin.constant"
# `%RUN_DIR` and `'%RUN_DIR/{epoch:02d}.keras'`: the run's directory in a value. In a configuration it stays as it is
# written, so that config.gin and a run's identity do not depend on where the run lies.
RUN_DIR = "RUN_DIR"
_MAX_LINE = 200  # characters of a line in a message

Scope = tuple[str, ...]


@dataclass(frozen=True)
class StatementSource:
    """The source of a statement: `file:line` or `--gin_param 'text'`, and the line itself."""

    location: str
    line: str = ""

    def error(self, message: str, error_id: str | None = None) -> UserError:
        """The user's error, with the statement that it is in."""
        line = self.line if len(self.line) <= _MAX_LINE else f"{self.line[:_MAX_LINE]} …"
        return build_user_error(f"{self.location}: {message}" + (f"\n    {line}" if line else ""), error_id=error_id)


@dataclass(frozen=True)
class Reference:
    """`@scope/function`, evaluated with `()`; `%NAME` is the evaluated reference to MACRO in the scope NAME."""

    target: str
    scope: Scope
    evaluate: bool


REQUIRED = Reference(CONSTANT, ("gin.REQUIRED",), True)  # `%gin.REQUIRED`


@dataclass(frozen=True)
class Setting:
    """`scope/target.parameter = value`; a macro's definition is the parameter `value` of MACRO in its scope."""

    scope: Scope
    target: str
    parameter: str
    value: Any
    source: StatementSource

    @property
    def key(self) -> tuple[Scope, str, str]:
        """The key that a later setting has to share to override this one."""
        return self.scope, self.target, self.parameter


@dataclass(frozen=True)
class Call:
    """A function called in a scope; `outer` is the scope of whoever receives what the function returns."""

    target: str
    scope: Scope = ()
    outer: Scope = ()


def map_references(value: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] = Reference) -> Any:
    """A copy of a value with every reference in it, keys of dicts included, replaced by `change(reference)`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {map_references(k, change, kind): map_references(v, change, kind) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_references(v, change, kind) for v in value)
    return value


def references(value: Any) -> list[Reference]:
    """All references within a value, however deep."""
    found: list[Reference] = []
    map_references(value, lambda reference: found.append(reference))
    return found


def is_run_dir(macro: str) -> bool:
    """Whether `macro`, without its %, is the run directory or a path below it."""
    return macro == RUN_DIR or macro.startswith(f"{RUN_DIR}/")


def substitute_run_dir(value: Any, run_dir: str | None) -> Any:
    """The value, with every text in it that begins with %RUN_DIR become a path.

    Raises:
      UserError: there is such a text, and no run directory.
    """

    def substitute_text(text: str) -> str:
        if not (text.startswith("%") and is_run_dir(text[1:])):
            return text
        if run_dir is None:
            raise UserError(f"%{RUN_DIR} is used, and this command has no run directory.")
        below = text.removeprefix(f"%{RUN_DIR}")
        return f"{run_dir.rstrip('/')}{below}" if below else run_dir

    return map_references(value, substitute_text, str)


class Graph:
    """The calls that settings lead to.

    Args:
      settings: all statements for a judgment of what could be meant, or the winners for what holds.
      shadowing: whether an inner scope's setting hides an outer scope's, as it does when the function is called.
    """

    def __init__(self, settings: Sequence[Setting], *, shadowing: bool) -> None:
        self._shadowing = shadowing
        self._by_target: dict[str, list[Setting]] = {}
        for setting in settings:
            self._by_target.setdefault(setting.target, []).append(setting)

    def settings_of(self, call: Call) -> list[Setting]:
        """Returns the settings of a call; a class takes those of its methods, too."""
        found = [
            setting
            for target, settings in self._by_target.items()
            if target == call.target or target.startswith(call.target + ".")
            for setting in settings
            if setting.scope == call.scope[: len(setting.scope)]
        ]
        if not self._shadowing:
            return found
        innermost_last = sorted(found, key=lambda setting: len(setting.scope))
        return list({(setting.target, setting.parameter): setting for setting in innermost_last}.values())

    def walk(self, starts: Iterable[Call], *, only_evaluated: bool = False) -> Iterator[tuple[Call, Setting | None]]:
        """Every call that the starts lead to, once, with the setting that names it (None for the starts).

        Args:
          only_evaluated: follow `@f()` alone: what is called before the start's own body is entered.
        """
        pending: list[tuple[Call, Setting | None]] = [(call, None) for call in starts]
        seen = set()
        while pending:
            call, setting = pending.pop()
            if call in seen:
                continue
            seen.add(call)
            yield call, setting
            pending += self.calls_of(call, only_evaluated=only_evaluated)

    def calls_of(self, call: Call, *, only_evaluated: bool) -> list[tuple[Call, Setting]]:
        """Returns the calls that the settings of a call lead to, each with its setting."""
        return [
            (self._call(reference, call), setting)
            for setting in self.settings_of(call)
            for reference in references(setting.value)
            if reference.evaluate or not only_evaluated
        ]

    @staticmethod
    def _call(reference: Reference, caller: Call) -> Call:
        outside = caller.outer if caller.target == MACRO else caller.scope
        if reference.target == MACRO:
            return Call(MACRO, reference.scope, outside)
        scope = reference.scope or (caller.scope if reference.evaluate else outside)
        return Call(reference.target, scope, scope)

    def find_used(self, starts: Iterable[Call]) -> set[int]:
        """The `id`s of the settings that a call reached from the starts takes."""
        return {id(setting) for call, _ in self.walk(starts) for setting in self.settings_of(call)}


def check_all_used(settings: Sequence[Setting], functions: Mapping[str, Function], roots: Mapping[str, str]) -> None:
    """Every setting is taken by a call that some statement, even an overridden one, leads to.

    Args:
      roots: the target of every root by its name.

    Raises:
      UserError: naming the settings that nothing takes.
    """
    graph = Graph(settings, shadowing=False)
    starts = [Call(root) for root in roots.values()]
    used = graph.find_used(starts)
    unused = [setting for setting in settings if id(setting) not in used]
    if unused:
        calls = [call for call, _ in graph.walk(starts)]
        errors = [str(s.source.error(_explain_unused(s, calls, functions, roots))) for s in unused]
        more = f"\n… and {len(errors) - 10} more of this kind." if len(errors) > 10 else ""
        raise build_user_error("\n".join(errors[:10]) + more, error_id="unknown-setting")


def _explain_unused(
    setting: Setting, calls: Sequence[Call], functions: Mapping[str, Function], roots: Mapping[str, str]
) -> str:
    if setting.target == MACRO:
        name = "/".join(setting.scope)
        used = {"/".join(call.scope) for call in calls if call.target == MACRO}
        parameters = {
            f"{root}.{parameter}": parameter
            for root, target in roots.items()
            for parameter in functions[target].parameters
        }
        meant = [full for full, parameter in parameters.items() if parameter == name]
        hint = suggest(name, used) or (f" Did you mean {' or '.join(map(repr, meant))}?" if meant else "")
        return f"the macro {name} is defined, but nothing that is used refers to %{name}.{hint}"
    function = functions[setting.target].name
    scopes = {"/".join(call.scope) for call in calls if call.target == setting.target}
    if scopes:
        wanted = "/".join(setting.scope)
        met = ", ".join(f"@{scope + '/' if scope else ''}{function}" for scope in sorted(scopes))
        return (
            f"no reference to {function} carries the scope {wanted!r}, so this has no effect; referred to are: {met}."
            f"{suggest(wanted, scopes)}"
        )
    names = {functions[call.target].name for call in calls if call.target not in (MACRO, CONSTANT)}
    return (
        f"nothing that is used refers to @{function}, so this has no effect. Refer to it from a setting, or remove "
        f"the line.{suggest(function, names)}"
    )


def check_no_circle(graph: Graph, functions: Mapping[str, Function], roots: Iterable[str]) -> None:
    """Raises UserError where `@f()` needs what it returns itself, and would be called for ever."""
    calls = {
        call: graph.calls_of(call, only_evaluated=True) for call, _ in graph.walk(map(Call, roots), only_evaluated=True)
    }
    try:
        graphlib.TopologicalSorter({call: [inner for inner, _ in made] for call, made in calls.items()}).prepare()
    except graphlib.CycleError as error:
        inner, call = error.args[1][:2]  # the second needs the first
        source = next(setting.source for each, setting in calls[call] if each == inner)
        name = functions[inner.target].name
        raise source.error(f"@{name}() is called for its own argument here, and so without end.") from None


def check_not_built_early(graph: Graph, functions: Mapping[str, Function], roots: Iterable[str]) -> None:
    """No optimizer, metric, layer or model is made before a root's body runs, so before the strategy's scope exists."""
    for call, setting in graph.walk([Call(root) for root in roots], only_evaluated=True):
        function = functions.get(call.target)
        if setting is not None and function is not None and function.builds:
            raise setting.source.error(
                f"@{function.name}() makes {function.builds} before the strategy's scope exists. Write "
                f"@{function.name}, without parentheses: it is built inside the strategy's scope."
            )


def check_complete(settings: Sequence[Setting], functions: Mapping[str, Function], root: str) -> None:
    """Everything that the root reaches has a value.

    Args:
      settings: those that hold.
      root: the target of the root that is about to run.

    Raises:
      UserError: naming what is missing: an unset `%gin.REQUIRED`, or parameters without a default and a setting of the
        root and of what is evaluated for it.
    """
    graph = Graph(settings, shadowing=True)
    for call, setting in graph.walk([Call(root)], only_evaluated=True):
        if call.target in (MACRO, CONSTANT):
            continue
        bound = {s.parameter for s in graph.settings_of(call) if s.target == call.target}
        parameters = functions[call.target].parameters
        missing = [name for name, default in parameters.items() if default is NO_DEFAULT and name not in bound]
        if missing:
            names = [f"{functions[call.target].name}.{parameter}" for parameter in missing]
            verb = "has no value" if len(names) == 1 else "have no values"
            write = f"Write {names[0]} = … in a gin file or --gin_param={f'{names[0]} = …'!r}."
            message = f"{', '.join(names)} {verb}. {write}"
            raise UserError(message) if setting is None else setting.source.error(message)
    for call, _ in graph.walk([Call(root)]):
        for setting in graph.settings_of(call):
            if REQUIRED in references(setting.value):
                name = setting_name(setting, functions)
                raise setting.source.error(
                    f"{name} must be set, and {functions[root].name} uses it. Write {name} = … in a gin file or "
                    f"--gin_param={f'{name} = …'!r}."
                )


def setting_name(setting: Setting, functions: Mapping[str, Function]) -> str:
    """Formats the left side of the setting's statement."""
    if setting.target == MACRO:
        return "/".join(setting.scope)
    return "/".join([*setting.scope, f"{functions[setting.target].name}.{setting.parameter}"])
