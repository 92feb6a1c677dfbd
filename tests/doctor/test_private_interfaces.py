"""The list of private interfaces is whole and short, and nothing on it is unused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from doctor.private_interfaces import OF_MODULES, OF_OBJECTS
from support import REPOSITORY

PACKAGE = REPOSITORY / "tfdist"
LIST = REPOSITORY / "tests" / "doctor" / "private_interfaces.py"
OF_OTHERS = {  # private names of other libraries, pinned to one release
    "_ambiguous": "gin",
    "_inverse_lookup": "gin",
    "_make_configurable": "gin",
    "_maybe_parse_basic_type": "gin",
    "_maybe_parse_container": "gin",
    "_parse_dict_item": "gin",
    "_symbol_source": "gin",
    "_symbol_table": "gin",
    "_compute_values_hash": "keras-tuner",
    "_record_values": "keras-tuner",
    "_http": "google-cloud-storage",
}
STORAGE = "client of Cloud Storage"
PUBLIC = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
LISTED = {name for names in OF_OBJECTS.values() for name in names if name.startswith("_")}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())


def defined(tree: ast.Module) -> set[str]:
    """The private names that a module gives to things itself."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    attributes = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    return names | {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def used_of_others(tree: ast.Module) -> set[str]:
    """The private attributes of what is not `self`, as attributes or as the names of some."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in LISTED:
            found.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in LISTED:
            found.add(node.arg)
    return found - PUBLIC


def private_imports(tree: ast.Module) -> set[tuple[str, str]]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(
            r"keras\.src|tensorflow\.(python|compiler|core|tsl)", node.module or ""
        ):
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            assert not any(re.match(r"keras\.src|tensorflow\.", alias.name) for alias in node.names)
    return found


@pytest.mark.slow
def test_no_private_interface_is_used_that_is_not_listed() -> None:
    used: set[str] = set()
    for path, tree in sources():
        own = used_of_others(tree)
        unknown = own - defined(tree) - LISTED - OF_OTHERS.keys() - {"_tfdist_links"}
        assert not unknown, (
            f"{path} uses {sorted(unknown)}: list them in {LIST.relative_to(REPOSITORY)}, with the reason"
        )
        used |= own
    assert used >= LISTED, f"nothing uses {sorted(LISTED - used)} any more"


@pytest.mark.slow
def test_nothing_private_is_imported_that_is_not_listed() -> None:
    modules = {f"{module}.{name}" for module, names in OF_MODULES.items() for name in names} | set(OF_MODULES)
    used = set()
    for path, tree in sources():
        for module, name in private_imports(tree):
            assert f"{module}.{name}" in modules, f"{path} imports {name} of {module}, which is not listed"
            used.add(f"{module}.{name}")
    assert all(any(each.startswith(module) for each in used) for module in OF_MODULES)


def test_they_are_few() -> None:
    of_keras_and_tensorflow = [*OF_MODULES.values(), *(OF_OBJECTS[owner] for owner in OF_OBJECTS.keys() - {STORAGE})]
    assert sum(map(len, of_keras_and_tensorflow)) <= 60
