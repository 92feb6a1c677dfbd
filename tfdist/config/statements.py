"""Reads gin files and params into statements, and checks what can be seen in them without importing anything.

Invariant: statements come in the order in which they apply, an included file's in the place of its `include`.
"""

from __future__ import annotations

import graphlib
import itertools
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gin.config_parser import ImportStatement, IncludeStatement

from tfdist.config import files_and_modules
from tfdist.config.graph import MACRO, RUN_DIR, StatementSource, references
from tfdist.config.syntax import Assignment, parse
from tfdist.errors import UserError, suggest

_MAX_WORD = 60  # characters of a value in a message
_MAX_PARAM = 200  # characters of a --gin_param in a message
MODULES_IN = "# modules in: "  # begins a line that names a directory in which a written configuration's modules lie
PARAMS = 0  # the `file` of all statements that came as a --gin_param


@dataclass(frozen=True)
class Statement:
    """A parsed statement, its source, and its file; a file that is included twice counts as two."""

    content: ImportStatement | IncludeStatement | Assignment
    source: StatementSource
    file: int


@contextmanager
def name_source(source: StatementSource) -> Iterator[None]:
    """Says of a UserError which statement it comes from."""
    try:
        yield
    except UserError as error:
        raise source.error(str(error), error.error_id) from error.__cause__


class Reader:
    """Collects the statements of files, of what they include, and of params.

    Attributes:
      statements: all statements but includes.
      directories: where the files lie.
      included: the files that each file includes itself, in their order.
    """

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.directories: list[Path] = []
        self.included: dict[int, list[int]] = {PARAMS: []}
        self._num_files = 0
        self._open: list[str] = []

    def read_file(self, name: str) -> None:
        """Reads a file and what it includes."""
        self._add_file(*self._find(name, None))

    def _find(self, name: str, including: Path | None) -> tuple[str, str, Path | None]:
        """The text of a file, how messages call it, and its path unless it is read from a URL."""
        if "://" not in name:
            path = files_and_modules.find_gin_file(name, including=including)
            shown = files_and_modules.shorten_path(path)
            return files_and_modules.read_text(shown), shown, path
        return files_and_modules.read_text(name), name, None

    def _add_file(self, text: str, shown: str, path: Path | None) -> None:
        if path is not None:
            self.directories.append(path.resolve().parent)
        lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        self.directories += [Path(n.removeprefix(MODULES_IN)) for n in lines if n.startswith(MODULES_IN)]
        self._num_files += 1
        file = self._num_files
        self.included[file] = []
        self._open.append(shown)
        self._add(text, lambda number, line: StatementSource(f"{shown}:{number}", line.strip()), file, path)
        self._open.pop()

    def _include(self, name: str, source: StatementSource, file: int, including: Path | None) -> None:
        with name_source(source):
            text, shown, path = self._find(name, including)
            if shown in self._open:
                circle = [*self._open[self._open.index(shown) :], shown]
                raise UserError(f"gin files include each other in a circle: {' → '.join(circle)}.")
        self.included[file].append(self._num_files + 1)
        self._add_file(text, shown, path)

    def read_params(self, params: Iterable[str]) -> None:
        """Reads the texts of `--gin_param`."""
        for param in params:
            shown = param.strip()
            source = StatementSource(
                f"--gin_param {shown if len(shown) <= _MAX_PARAM else shown[:_MAX_PARAM] + ' …'!r}"
            )
            words = param.split()
            if "=" not in param and (not words or words[0] not in ("import", "from", "include")):
                raise source.error(
                    "it has no '='. Write NAME.PARAMETER = VALUE, such as --gin_param='train.epochs = 3'."
                )
            self._add(param, lambda *_, source=source: source, PARAMS, None)

    def _add(self, text: str, source_of: Callable[[int, str], StatementSource], file: int, path: Path | None) -> None:
        last = 0
        try:
            for content, last, line in parse(text):
                source = source_of(last, line)
                if isinstance(content, IncludeStatement):
                    self._include(content.filename, source, file, path)
                else:
                    self.statements.append(Statement(content, source, file))
        except SyntaxError as error:
            if isinstance(error, IndentationError):
                raise source_of(error.lineno or 1, error.text or "").error(f"cannot read this: {error.msg}.") from error
            message, (_, number, _, line) = error.args
            raise source_of(number, line).error(_syntax_hint(message, line)) from error
        except (tokenize.TokenError, StopIteration) as error:
            rest = enumerate(text.splitlines()[last:], start=last + 1)
            begin = next(((n, line) for n, line in rest if line.strip() and line.strip()[0] != "#"), (max(last, 1), ""))
            raise source_of(*begin).error("a bracket or a long text that begins about here is not closed.") from error


def _syntax_hint(message: str, line: str) -> str:
    """gin's message about a text that it cannot read, and what was probably meant."""
    reason, failed, word = message.partition("\n    Failed to parse token '")
    if failed:
        return _value_hint(word[:-1], reason)
    hints = {
        "Expected ')'.": "Between the arguments of a function stand commas: @module.function(size=3, depth=2).",
        "Expected an argument.": "Arguments have names, as in @module.function(size=3), or lines of their own, such as "
        "module.function.size = 3.",
        "Expected newline.": "One statement a line, and gin does not calculate: 0.001, not 1 / 1000.",
        "Expected ':'.": "Between braces stand pairs, 'key': value; a list has brackets, [].",
        "Unable to parse value.": "A value is a literal such as 3, 'text' or [1, 2], @module.function, or %MACRO.",
        "Couldn't parse statement, expected ':' or '='.": "Write NAME.PARAMETER = VALUE.",
        "No key.": "The key of a dict is a text, a number or a tuple of these.",
        "Not Unicode.": "The text has characters that cannot be stored as UTF-8.",
    }
    if line.lstrip().startswith("%"):
        return "cannot read this. A macro is defined without the '%': NAME = VALUE."
    if f"%{RUN_DIR}/" in line and message in ("Malformatted scope or selector.", "Expected newline."):
        hints[message] = f"A path of more than letters, digits, _ and . has quotes: '%{RUN_DIR}/…'."
    return f"cannot read this: {message} {hints.get(message, '')}".rstrip()


def _value_hint(word: str, reason: str) -> str:
    """Says what was probably meant by a value that Python cannot read, for the `reason` that Python gives."""
    shown = word if len(word) <= _MAX_WORD else f"{word[:_MAX_WORD]}…"
    if re.match(r"[A-Za-z]*['\"]", word) or word[0].isdigit():
        return f"cannot read the value {shown}: {reason.removesuffix(' (<unknown>, line 1)')}."
    if word.startswith("-"):
        return f"cannot read the value {shown}. Only a number can follow '-'."
    if word.lower() in ("true", "false", "none"):
        return f"cannot read the value {word}. Did you mean {word.capitalize()}?"
    return f"cannot read the value {shown}. Text has quotes, {shown!r}; a function is @{shown}, a macro %{shown}."


def check_macros(statements: Sequence[Statement], *, is_constant: Callable[[str], bool], imported: bool) -> None:
    """Raises UserError for an undefined macro, one that needs itself, or one that redefines RUN_DIR.

    Args:
      is_constant: whether gin knows a constant of this name.
      imported: all modules have been imported. Until then an unknown name may be a constant that one of the user's own
        modules will define, so only what resembles a known name is refused.
    """
    definitions = {s.content.macro: s for s in statements if isinstance(s.content, Assignment) and s.content.macro}
    if own := definitions.get((RUN_DIR,)):
        raise own.source.error(f"the macro {RUN_DIR} is given by --run_dir. Give yours another name.")
    known = ("__gin__", *files_and_modules.FRAMEWORKS)
    imports = [s.content for s in statements if isinstance(s.content, ImportStatement)]
    own_modules = [each for each in imports if each.module.split(".")[0] not in known]
    for statement in statements:
        for name in _macros_in(statement):
            if name in definitions or is_constant("/".join(name)):
                continue
            near = suggest("/".join(name), ["gin.REQUIRED", RUN_DIR, *map("/".join, definitions)])
            if imported or near or not own_modules:
                define = f" Define it in a gin file: {'/'.join(name)} = …"
                strategy = " Remove the line: without it the strategy is what fits." if name[-1] == "STRATEGY" else ""
                advice = near or strategy or define
                raise statement.source.error(f"the macro %{'/'.join(name)} is defined nowhere.{advice}")
    try:
        graphlib.TopologicalSorter({macro: _macros_in(each) for macro, each in definitions.items()}).prepare()
    except graphlib.CycleError as error:
        macro = next(each for each in definitions if each in error.args[1])
        source = definitions[macro].source
        raise source.error(f"the macro {'/'.join(macro)} is defined by way of itself.") from None


def _macros_in(statement: Statement) -> list[tuple[str, ...]]:
    value = statement.content.value if isinstance(statement.content, Assignment) else None
    return [reference.scope for reference in references(value) if reference.target == MACRO]
