"""Holds the layering of docs/architecture.md by reading every module's imports with `ast`, and shows that it bites."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest
from support import REPOSITORY

# Each part of the package, with the parts it may import: those below it. Parts of one level do not know each other.
FOUNDATION = {
    "storage",
    "telemetry",
    "settings",
    "keras_patches",
    "user_code",
    "command_line",
    "requirements",
    "error_ids",
    "errors",
}
COMPUTING = {"strategies"} | FOUNDATION
MATERIAL = {"data", "tasks", "recipes", "checkpoint"} | COMPUTING
MAY_IMPORT = {
    "": {"keras_fit"},  # the package itself, whose names are imported when they are first used
    "__main__": {"commands"},
    "commands": {
        "",  # the version
        "main",
        "new",
        "doctor",
        "launch",
        "config",
        "experiment",
        "training",
        "tuning",
        "tpu_compiler",
        "report",
    }
    | MATERIAL,
    "build_horovod": {"strategies.cluster", "command_line", "requirements", "errors"},
    "new": {"main", "tuning", "report"} | MATERIAL,
    "main": {"config", "experiment", "planning", "serving", "tuning", "training", "report"}
    | {"xla_cache", "commands.prove"}
    | MATERIAL,
    "keras_fit": {"experiment", "training"} | MATERIAL,
    "launch": {"strategies.cluster", "telemetry", "storage", "command_line", "requirements", "errors"},
    "doctor": COMPUTING,
    "config": {"tuning", "training"} | MATERIAL,
    "experiment": {"tuning", "training"} | MATERIAL,
    "planning": {"tpu_compiler", "training", "tuning"} | MATERIAL,
    "serving": {"training", "tuning"} | MATERIAL,
    "tuning": {"training", "launch", "report"} | MATERIAL,
    "tpu_compiler": {"training", "tuning"} | MATERIAL,
    "training": MATERIAL,
    "data": COMPUTING,
    "tasks": COMPUTING,
    "recipes": COMPUTING,
    "checkpoint": COMPUTING,
    "strategies": FOUNDATION,
    "report": {"telemetry", "storage", "errors"},
    "telemetry": {"storage", "requirements", "errors"},  # what is told is stored
    "storage": {"errors"},
    "settings": {"errors"},
    "user_code": {"errors"},
    "command_line": {"telemetry", "requirements", "error_ids", "errors"},
    "requirements": {"errors"},
    "xla_cache": {"errors"},
    "error_ids": {"errors"},
    "errors": set(),
    "keras_patches": set(),
    "models": set(),
}
PACKAGE = "tfdist"
# Lines and files of each room. A change may raise a budget by what its issue names, and lowers it where it removes.
BUDGETS = {
    "": (1_815, 11),
    "checkpoint": (1_895, 13),
    "commands": (1_650, 11),
    "config": (1_670, 9),
    "data": (4_770, 35),
    "doctor": (571, 7),
    "keras_fit": (1_300, 7),
    "keras_patches": (370, 3),
    "launch": (2_760, 19),
    "models": (330, 6),
    "new": (630, 8),
    "planning": (1_795, 7),
    "recipes": (880, 7),
    "report": (990, 8),
    "serving": (760, 7),
    "settings": (230, 3),
    "storage": (1_595, 10),
    "strategies": (2_460, 16),
    "tasks": (1_540, 10),
    "telemetry": (3_470, 26),
    "tpu_compiler": (680, 8),
    "training": (11_190, 51),
    "tuning": (3_275, 20),
    "tests": (35_615, 207),
    "benchmarks and tools": (5_970, 46),
}
# Modules (or packages) that alone may import a library.
ONLY_IMPORTERS = {
    "gin": {"config"},
    "horovod": {"strategies.horovod", "launch.horovod_workers"},
    "keras_tuner": {"tuning"},
    "optuna": {"tuning.search"},
    "ray": {"launch.ray_workers"},
    "jax": {"tpu_compiler.compile_program"},
}
# strategies.cluster reads it for the strategies: TF_CONFIG, and the rest in environment.py.
ENVIRONMENT_READERS = {"main", "commands", "build_horovod", "launch", "strategies.cluster"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@pytest.mark.slow
def test_the_package_keeps_its_layers() -> None:
    found = violations(REPOSITORY / PACKAGE)
    assert not found, "\n".join(found)


# What is checked


@dataclasses.dataclass(frozen=True)
class Module:
    """A source file; `name` is its dotted name below the package, "" for the package itself."""

    path: pathlib.Path
    name: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The layer it belongs to. What `python -m` runs belongs to the commands."""
        return "commands" if self.name.endswith(".__main__") else self.name.split(".")[0]


def violations(package: pathlib.Path) -> list[str]:
    """One line for each breach of the layering in `package`, sorted."""
    modules = {module.name: module for module in read_modules(package)}
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module in modules.values():
        graph[module.name] = set()
        for line, target in imports(module, package.name):
            own = own_module(target, package.name, modules)
            if own is None:
                found += [f"{module.name}:{line}: {text}" for text in library_breach(module, target)]
            else:
                graph[module.name].add(own)
                found += [f"{module.name}:{line}: {text}" for text in layer_breach(module, own)]
        found += [f"{module.name}:{line}: reads the environment" for line in environment_reads(module)]
        found += shape_breaches(module)
    return sorted(set(found)) + [f"circle: {' → '.join(circle)}" for circle in circles(graph)]


def read_modules(package: pathlib.Path) -> Iterator[Module]:
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield Module(path, name, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def imports(module: Module, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported, also inside functions and through import_module."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = source or ""
                if level:
                    inside = [package, *filter(None, module.name.split("."))]
                    is_package = module.path.name == "__init__.py"
                    above = inside[: len(inside) - level + is_package]
                    base = ".".join([*above, *filter(None, [source])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]
            ):
                if called in ("import_module", "__import__"):
                    yield node.lineno, name


def own_module(target: str, package: str, modules: dict[str, Module]) -> str | None:
    """The module of the package that `target` (a module or a name in one) stands for; None for a library."""
    first, *rest = target.split(".")
    if first != package:
        return None
    while rest and ".".join(rest) not in modules:
        rest.pop()
    return ".".join(rest)


def layer_breach(module: Module, own: str) -> Iterator[str]:
    part = own.split(".")[0]
    if part == module.part:
        return
    if module.part not in MAY_IMPORT:
        yield f"{module.part!r} has no place in the layers: give it one in {pathlib.Path(__file__).name}"
    elif not belongs(own, MAY_IMPORT[module.part]):
        yield f"{module.part} may not import {own or 'the package itself'}"


def library_breach(module: Module, target: str) -> Iterator[str]:
    importers = ONLY_IMPORTERS.get(target.split(".")[0])
    if importers is not None and not belongs(module.name, importers):
        yield f"only {' and '.join(sorted(importers))} may import {target.split('.')[0]}"


def environment_reads(module: Module) -> Iterator[int]:
    """The lines that read or set this process's environment through `os`, under whichever name it was imported."""
    if belongs(module.name, ENVIRONMENT_READERS):
        return
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os"
    }
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in aliases:
                if attribute in ENVIRONMENT_NAMES:
                    yield node.lineno
            case ast.ImportFrom(module="os", names=names) if {alias.name for alias in names} & ENVIRONMENT_NAMES:
                yield node.lineno


def shape_breaches(module: Module) -> Iterator[str]:
    if "utils" in module.name.split("."):
        yield f"{module.name}: a module is named for what it does, not utils"
    if module.path.name == "__init__.py" and module.tree.body and not (module.name == "" and is_lazy(module.tree)):
        yield f"{module.name or 'the package'}: its __init__.py is not empty"


LAZY_IMPORTS = ("import importlib", "from typing import Any")


def is_lazy(tree: ast.Module) -> bool:
    """Whether a package only offers names that it imports on first use, so that `import tfdist` stays quick."""
    return all(
        isinstance(node, ast.Expr)  # its docstring
        or (isinstance(node, ast.ImportFrom | ast.Import) and ast.unparse(node) in LAZY_IMPORTS)
        or (
            isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", None) in ("_NAMES", "_MODULES", "__version__")
        )
        or (isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"))
        for node in tree.body
    )


def belongs(name: str, names: set[str]) -> bool:
    """Whether `name` is one of `names` or lies in a package among them."""
    return any(name == each or name.startswith(f"{each}.") for each in names)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The circles among the modules, each once, from its first module back to it."""
    found: dict[frozenset[str], list[str]] = {}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            start = circle.index(min(circle))
            found.setdefault(frozenset(circle), [*circle[start:], *circle[:start], circle[start]])
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return list(found.values())


@pytest.mark.slow
def test_the_rooms_of_data_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in read_modules(REPOSITORY / PACKAGE / "data"):
        targets = [target.split(".") for _, target in imports(module, PACKAGE)]
        rooms = {path[2] for path in targets if path[:2] == [PACKAGE, "data"] and len(path) > 2}
        graph.setdefault(module.part, set()).update(rooms - {module.part})
    assert circles(graph) == []


# That it bites


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"data/a.py": "def f():\n    import tfdist.tasks.b", "tasks/b.py": ""}, "data may not import tasks.b"),
        ({"experiment.py": "import importlib\nimportlib.import_module('gin')"}, "only config may import gin"),
        ({"data/a.py": "import os as system\nsystem.getenv('A')"}, "data.a:2: reads the environment"),
        ({"data/__init__.py": "def __getattr__(name): ..."}, "data: its __init__.py is not empty"),
        ({"data/a.py": "import tfdist.data.b", "data/b.py": "import tfdist.data.a"}, "circle: data.a → data.b → data."),
    ],
)
def test_a_breach_is_found(tmp_path: pathlib.Path, files: dict[str, str], expected: str) -> None:
    found = violations(write_package(tmp_path, files))
    assert len(found) == 1
    assert expected in found[0]


def test_no_room_is_larger_than_its_budget() -> None:
    found = {room.name: measure(room) for room in (REPOSITORY / PACKAGE).iterdir() if any(room.glob("*.py"))}
    found[""] = measure(REPOSITORY / PACKAGE, "*.py")
    found["tests"] = measure(REPOSITORY / "tests")
    beside = [measure(REPOSITORY / name) for name in ("benchmarks", "tools")]
    found["benchmarks and tools"] = tuple(map(sum, zip(*beside, strict=True)))
    assert found.keys() == BUDGETS.keys()
    too_large = {room: (size, BUDGETS[room]) for room, size in found.items() if not fits(size, BUDGETS[room])}
    assert not too_large, "remove something, or raise the budget by what the change's issue names"


def measure(folder: pathlib.Path, pattern: str = "**/*.py") -> tuple[int, int]:
    """Lines and files."""
    files = list(folder.glob(pattern))
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files), len(files)


def fits(size: tuple[int, ...], budget: tuple[int, int]) -> bool:
    return all(found <= allowed for found, allowed in zip(size, budget, strict=True))


def write_package(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    package = folder / PACKAGE
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package
