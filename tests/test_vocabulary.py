"""Definitions have names of the field: nouns for things, verbs with their object for functions."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator

from support import REPOSITORY, parse_package

# Words that name nothing by themselves, with what to write.
BANNED = {
    "found": "what was found: weights, matches, description",
    "given": "arguments, request",
    "told": "reported, logged",
    "tell": "report, log, print",
    "said": "text, message",
    "say": "report, print, format",
    "held": "what holds it: buffer, arrays_in_memory",
    "hold": "store, keep alive, assign",
    "apart": "sharded, separate process",
    "placed": "shard_variables, with_device",
    "made": "build_record, instance_of",
}
PREPOSITIONS = {*("of", "in", "at", "by", "over", "between", "beside", "behind", "after", "before", "than", "under")}
# Names with a reason: `as_…`, `to_…`, `from_…`, `with_…` and `on_…` convert, construct, copy and handle, as elsewhere.
ALLOWED = {
    "_by_output": "a mapping's key",
    "by_output": "a mapping's key",
    "by_worker": "a list's order",
    "in_bytes": "a unit",
    "_in_multi_worker_mode": "TensorFlow's",
    "_in_replica": "a condition",
    "before_call": "a hook",
    "after_call": "a hook",
    "of": "of a reading: the seconds that it may take",
    "adapted": "saved runs name the function of their model so",
    "feed": "a verb",
    "proceed": "a verb",
    "preprocessing": "a noun",
    "setting": "a noun",
    "warning": "a level of events",
}
PARTICIPLE = re.compile(r"[a-z]+(ed|ing)|built|chosen|drawn|few|fine|kept|one|own|same|shown|written")


def definitions() -> Iterator[tuple[str, ast.AST, str]]:
    """Every class and function: the file, the node and the name."""
    for file, tree in parse_package().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(file.relative_to(REPOSITORY)), node, node.name


def test_names_name_something_and_no_function_is_called_by_a_preposition_or_a_participle_alone() -> None:
    found = list(definitions())
    assert len(found) > 3000
    wrong: list[tuple[str, ...]] = []
    for file, node, name in (each for each in found if each[2] not in ALLOWED):
        words = name.strip("_").lower().split("_")
        wrong += [(file, name, BANNED[word]) for word in words if word in BANNED]
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
        is_participle = is_function and PARTICIPLE.fullmatch(name.strip("_"))
        wrong += [(file, name)] if name.strip("_").split("_")[0] in PREPOSITIONS or is_participle else []
    assert not wrong


def test_no_two_modules_or_two_classes_share_a_name() -> None:
    files: dict[str, set[str]] = collections.defaultdict(set)
    for module in parse_package():
        if module.name not in ("__init__.py", "__main__.py"):
            files[module.stem].add(str(module.relative_to(REPOSITORY)))
    for file, node, name in definitions():
        if isinstance(node, ast.ClassDef) and not name.startswith("_"):
            files[name].add(file)
    assert not {name: found for name, found in files.items() if len(found) > 1}


def test_what_is_public_has_a_docstring() -> None:
    """Properties and what overrides a method, of a class here or of a library, need none."""
    classes = {name: node for _, node, name in definitions() if isinstance(node, ast.ClassDef)}
    bare = []
    for file, tree in parse_package().items():
        for node in public(tree.body):
            bare += [(file.name, node.name)] if ast.get_docstring(node) is None else []
            methods = public(node.body) if isinstance(node, ast.ClassDef) else []
            bare += [
                (file.name, f"{node.name}.{method.name}")
                for method in methods
                if ast.get_docstring(method) is None
                if not is_property(method) and not is_override(node, method.name, classes)
            ]
    assert not bare


def public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The definitions of a body whose names begin with no underscore."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(re.search(r"property$|\.setter$", ast.unparse(each)) for each in decorators)


def is_override(node: ast.ClassDef, method: str, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a base class has the method; a library's class is taken to have any."""
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in classes:
            own = [each.name for each in classes[name].body if isinstance(each, ast.FunctionDef)]
            if method in own or is_override(classes[name], method, classes):
                return True
        elif name not in ("ABC", "Enum", "Exception", "Generic", "NamedTuple", "Protocol"):
            return True
    return False
