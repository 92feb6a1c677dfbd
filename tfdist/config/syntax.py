"""gin's syntax, and what differs in ours: reads a text into statements.

Invariant: references and macros stay as they are written, for `loading` to resolve; `@f(a=1)` is `@scope/f()` with
`scope/f.a = 1`. What gin would forget or overwrite in silence (a sign, a key that stands twice) is an error.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gin import config_parser
from gin.config_parser import ImportStatement, IncludeStatement

from tfdist.config.graph import MACRO, Reference, references
from tfdist.errors import is_unicode

# gin's version is pinned. Of its private names this module uses what _Parser takes from ConfigParser.
_MAX_NESTING = 50  # brackets and calls within each other
INLINE = "with_"  # begins the scope that holds the arguments of `@f(a=1)`


@dataclass(frozen=True)
class Assignment:
    """`scope/function.parameter = value`, or the macro `scope/function = value` when the parameter is empty.

    A block's head, `scope/function:`, is one with the parameter None.
    """

    scope: tuple[str, ...]
    function: str
    parameter: str | None
    value: Any

    @property
    def macro(self) -> tuple[str, ...] | None:
        """The scopes and the name of the macro that the assignment defines; None where it sets a parameter."""
        return (*self.scope, self.function) if self.parameter == "" else None


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
        if self._nesting > _MAX_NESTING:
            self._raise_syntax_error(f"More than {_MAX_NESTING} brackets stand within each other.")
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
            self._raise_syntax_error("No key.", location)
        if references(key):
            self._raise_syntax_error("No key.", location)
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


def parse(text: str) -> Iterator[tuple[ImportStatement | IncludeStatement | Assignment, int, str]]:
    """The statements of a text, each with the number and the content of its line; raises SyntaxError."""
    parser = _Parser(text)
    while (parsed := parser.parse_statement()) is not None:
        place = parsed.location.line_num, parsed.location.line_content
        yield from ((argument, *place) for argument in parser.inline)
        parser.inline.clear()
        if isinstance(parsed, ImportStatement | IncludeStatement):
            content = parsed._replace(location=None)  # the same import in two files is one
        else:
            scope = tuple(parsed.scope.split("/")) if parsed.scope else ()
            is_head = isinstance(parsed, config_parser.BlockDeclaration)
            content = Assignment(
                scope, parsed.selector, None if is_head else parsed.arg_name, None if is_head else parsed.value
            )
        yield content, *place
