"""Definitions have names of the field: nouns for things, verbs with their object for functions."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator

from support import REPOSITORY

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
    "placed": "place_variable, with_device",
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
    "_in_parts": "of canonical sums",
    "_in_replica": "a condition",
    "_in_step": "a condition",
    "before_call": "a hook",
    "after_call": "a hook",
    "of": "of a reading: the seconds that it may take",
}


def definitions() -> Iterator[tuple[str, ast.AST, str]]:
    """Every class and function: the file, the node and the name."""
    for file in sorted((REPOSITORY / "tfdist").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(file.relative_to(REPOSITORY)), node, node.name


def test_no_name_is_one_of_the_words_that_name_nothing() -> None:
    found = list(definitions())
    assert len(found) > 3000
    banned = [
        (file, name, BANNED[word])
        for file, _, name in found
        for word in name.strip("_").lower().split("_")
        if word in BANNED and name not in ALLOWED
    ]
    assert not banned


def test_no_function_begins_with_a_preposition() -> None:
    begun = [(file, name) for file, _, name in definitions() if name.strip("_").split("_")[0] in PREPOSITIONS]
    assert not [each for each in begun if each[1] not in ALLOWED]


def test_no_two_classes_share_a_name() -> None:
    files: dict[str, set[str]] = collections.defaultdict(set)
    for file, node, name in definitions():
        if isinstance(node, ast.ClassDef) and not name.startswith("_"):
            files[name].add(file)
    assert not {name: places for name, places in files.items() if len(places) > 1}
